"""Items of `/v1/responses`: words and calls in the order they were written, the same in a stream and without one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.samples import FUNCTION
from tests.server.serving import Server, events

pytestmark = pytest.mark.xdist_group("server")

TOOL: Any = {"type": "function", "strict": False, **FUNCTION["function"]}
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"town": "(Ulm|Bonn)"\}\}</tool_call>'
KEPT = ("type", "status", "content", "name", "arguments")  # of an item; ids are new each time


def items(server: Server, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    body = {"input": "is it wet?", "tools": [TOOL], "seed": 4, "stream": stream, **fields}
    status, answer, _ = server.post("/v1/responses", body)
    assert status == 200, answer
    output = events(answer)[-1]["response"]["output"] if stream else answer["output"]
    return [{name: item[name] for name in KEPT if name in item} for item in output]


@pytest.mark.parametrize("stream", [False, True])
def test_words_after_a_call_stand_after_it(server, stream):
    made = items(server, stream, guided_regex=f"Well\\. {CALL} So: {CALL} y")
    assert [item["type"] for item in made] == ["message", "function_call", "message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in made if "content" in item] == ["Well. ", " So: ", " y"]


@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}, {"stop": "So"}, {"max_output_tokens": 60}])
@pytest.mark.parametrize("form", [f"(é|世){{2}}{CALL} (So|🙂){{3}}{CALL}\n", f"{CALL}", "(é|世|a){9}<tool", "a"])
def test_a_stream_and_a_whole_answer_have_the_same_items_and_scores(server, form, more):
    fields = {"guided_regex": form, "include": ["message.output_text.logprobs"], "top_logprobs": 1, **more}
    whole = items(server, False, **fields)
    assert whole == items(server, True, **fields)
    for item in whole:
        [part] = item.get("content", [None])
        if part is not None:
            spelt = b"".join(bytes(score["bytes"]) for score in part["logprobs"]).decode("utf-8", "replace")
            assert spelt.startswith(part["text"]) and len(spelt) < len(part["text"]) + 12, "the words' own tokens"
