"""From a body to what the engine is asked: sampling that the body leaves to the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from verifypd.server.ask import Limits, completion, sampling
from verifypd.server.calls import CallError
from verifypd.server.responses import ResponsesBody, chat_body, repeated
from verifypd.server.schema import CompletionBody

PLAIN = Limits(max_model_len=100, vocab=384, max_output_tokens=None, max_choices=4, max_scores=1 << 20)
MODEL = replace(PLAIN, defaults={"temperature": 0.6, "top_p": 0.95, "top_k": 20})


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"temperature": None}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, {}),
    ],
)
def test_fields_that_a_body_leaves_out_are_the_models(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    body = CompletionBody(prompt="a", **sent)
    assert sampling(body, MODEL, 5) == {**expected, "max_tokens": 5}
    said = {name: value for name, value in sent.items() if value == 0.0 and name == "temperature"}
    assert sampling(body, PLAIN, 5) == {**said, "max_tokens": 5}


@pytest.mark.parametrize(("most", "expected"), [(None, 16), (400, 16), (5, 5)])
def test_a_completion_that_names_no_length_keeps_to_the_servers(most: int | None, expected: int) -> None:
    limits = replace(PLAIN, max_output_tokens=most)
    made = completion(CompletionBody(prompt=[5, 6]), limits, None, 0)
    assert made.ask.params.max_tokens == expected
    if most is not None:
        with pytest.raises(CallError, match=f"more than this server allows \\({most}\\)"):
            completion(CompletionBody(prompt=[5, 6], max_tokens=most + 1), limits, None, 0)


def test_a_response_repeats_what_was_understood() -> None:
    body = ResponsesBody(input="a", top_p=0.5)
    assert sampling(chat_body(body), MODEL, 5) == {"temperature": 0.6, "top_p": 0.5, "top_k": 20, "max_tokens": 5}
    told = repeated(body, MODEL)
    assert (told["temperature"], told["top_p"]) == (0.6, 0.5)
    assert repeated(ResponsesBody(input="a"), PLAIN)["temperature"] == 1.0
