"""Who wrote each output token: drafts that stood, corrections in place of drafts that fell, bonuses, plain tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.arms import make, parameters, prompts
from verifypd import SamplingParams
from verifypd.batch import Verdict, VerifySpan
from verifypd.engine.verdicts import origins
from verifypd.request import TokenOrigin

SPAN = VerifySpan(0, 4, 3, None, True, 20, "model")


def verdict(accepted: int, drafted: int, tokens: tuple[int, ...]) -> Verdict:
    return Verdict(0, accepted, drafted, tokens, None, drafts=(7, 8, 9)[:drafted])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (verdict(0, 0, (1,)), [TokenOrigin("plain")]),
        (verdict(1, 3, (7, 2)), [TokenOrigin("draft"), TokenOrigin("correction", (8, 9))]),
        (verdict(2, 2, (7, 8, 3)), [*[TokenOrigin("draft")] * 2, TokenOrigin("bonus")]),
        (verdict(2, 2, (7, 8)), [TokenOrigin("draft")] * 2),  # it ended with a draft
    ],
)
def test_a_verdict_says_who_wrote_its_tokens(given: Verdict, expected: list[TokenOrigin]) -> None:
    assert origins(SPAN, given) == expected
    copied = [replace(each, writer="lookup") if each.writer == "draft" else each for each in expected]
    assert origins(SPAN._replace(drafter="ngram"), given) == copied


@pytest.mark.parametrize(("arch", "drafter"), [("unified", "model"), ("pdv", "ngram"), ("auto", "model")])
def test_origins_add_up_and_change_no_text(pair: tuple[Path, Path], arch: str, drafter: str) -> None:
    with make(pair, arch, drafter) as llm:
        plain = llm.generate(prompts(6), parameters(6))
        asked = [replace(each, token_origins=True) for each in parameters(6)]
        told = llm.generate(prompts(6), asked)
        assert not llm.engine.verify.shown
    own = {"ngram": "lookup"}.get(drafter, "draft")
    assert [o.outputs[0].token_ids for o in told] == [o.outputs[0].token_ids for o in plain]
    assert all(output.outputs[0].token_origins is None for output in plain)
    for output in told:
        choice, metrics = output.outputs[0], output.metrics
        assert choice.token_origins is not None and len(choice.token_origins) == len(choice.token_ids)
        writers = [origin.writer for origin in choice.token_origins]
        assert writers[0] == "plain" and set(writers) <= {"plain", own, "correction", "bonus"}
        assert writers.count(own) == metrics.accepted
        assert sum(len(origin.rejected) for origin in choice.token_origins) == metrics.drafted - metrics.accepted
        for origin, token in zip(choice.token_origins, choice.token_ids, strict=True):
            assert bool(origin.rejected) == (origin.writer == "correction")
            assert not origin.rejected or origin.rejected[0] != token, "a draft that fell is not what stands there"


def test_without_speculation_every_token_is_plain(pair: tuple[Path, Path]) -> None:
    with make(pair, "unified") as llm:
        params = SamplingParams(max_tokens=10, temperature=0, speculation=False, token_origins=True)
        [output] = llm.generate([prompts(1)[0]], params)
    assert output.outputs[0].token_origins == [TokenOrigin("plain")] * len(output.outputs[0].token_ids)
