"""Sampling parameters are checked at birth, and metrics mean what the documentation says."""

from __future__ import annotations

from typing import Any

import pytest

from verifypd.errors import RequestError
from verifypd.request import Request, RequestMetrics, SamplingParams, State, check_bad_words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_k", -2),
        ("top_k", True),
        ("min_p", 1.5),
        ("seed", 2**70),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("stop", 5),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", ["a"] * 65),
        ("stop", "a" * 1025),
        ("bad_words", "damn"),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 257),
        ("logit_bias", [1]),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: float("inf")}),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", []),
        ("stop_token_ids", ["a"]),
        ("speculation", "false"),
        ("ignore_eos", 1),
        ("acceptance", "maybe"),
        ("max_draft", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert "\n" not in str(error.value)


def test_bad_words_as_token_ids_are_short_and_in_the_vocabulary() -> None:
    check_bad_words([], 10)
    check_bad_words([[1] * 32, [9]], 10)
    for words in ([[2], [1] * 33], [[2], [1, 10]], [[-1]]):
        with pytest.raises(RequestError, match="bad_words") as error:
            check_bad_words(words, 10)
        assert error.value.param == "bad_words"


def test_contradictions_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=9, max_tokens=3)
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_metrics_count_drafts_and_not_corrections() -> None:
    metrics = RequestMetrics()
    assert metrics.mean_accepted_length == 1.0
    metrics.count(drafted=4, accepted=3, emitted=4)
    metrics.count(drafted=0, accepted=0, emitted=1)
    metrics.count(drafted=2, accepted=0, emitted=1)
    assert metrics.acceptance_rate == 3 / 6
    assert metrics.mean_accepted_length == 5 / 2, "tokens per span that carried drafts"
    assert metrics.drafted_per_position == [2, 2, 1, 1]
    assert metrics.accepted_per_position == [1, 1, 1, 0]


def test_the_wait_for_the_first_slot_is_kept() -> None:
    request = Request("", [5], SamplingParams(), seed=0, max_length=9, arrival=10.0)
    assert request.metrics.time_in_queue is None
    for state, now in ((State.PREFILL, 10.5), (State.WAITING, 11.0), (State.PREFILL, 19.0)):
        request.enter(state, now)
    assert request.metrics.time_in_queue == 0.5, "what comes after a preemption is no queue"
