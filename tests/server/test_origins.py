"""The origin of each token, where a client asks for it: in streams and whole answers, beside the same text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.samples import FUNCTION, IDS, PROMPT
from tests.server.serving import Server, events

pytestmark = pytest.mark.xdist_group("server")

FIELDS = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
ASKED = {**FIELDS, "return_token_origins": True}
WRITERS = {"plain", "draft", "lookup", "correction", "bonus"}


def pieces(text: str, origins: list[dict[str, Any]]) -> list[str]:
    """The text, cut where tokens begin."""
    ends = [*(each["text_offset"] for each in origins[1:]), len(text)]
    return [text[each["text_offset"] : end] for each, end in zip(origins, ends, strict=True)]


def test_origins_come_when_asked_for_only_and_change_no_text(server: Server) -> None:
    plain = server.complete(IDS, **FIELDS)["choices"][0]
    told = server.complete(IDS, **ASKED, return_token_ids=True)["choices"][0]
    assert "token_origins" not in plain and told["text"] == plain["text"]
    origins = told["token_origins"]
    assert len(origins) == len(told["token_ids"]) == 40
    assert {"plain", "draft", "correction"} <= {each["origin"] for each in origins} <= WRITERS
    assert "".join(pieces(told["text"], origins)) == told["text"]
    assert all(("rejected" in each) == (each["origin"] == "correction") for each in origins)
    assert all(each["rejected"] for each in origins if "rejected" in each)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_brings_each_origin_once(server: Server, path: str) -> None:
    body = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    status, whole, _ = server.post(path, {**body, **ASKED})
    assert status == 200
    parts = events(server.post(path, {**body, **ASKED, "stream": True})[1])
    streamed = [origin for part in parts for c in part["choices"] for origin in c.get("token_origins", [])]
    assert streamed == whole["choices"][0]["token_origins"]
    assert all("token_origins" not in c for part in events(server.post(path, {**body, **FIELDS, "stream": True})[1])
               for c in part["choices"])  # fmt: skip


def test_echo_moves_the_offsets_and_a_stop_string_cuts_them(server: Server) -> None:
    echoed = server.complete(PROMPT, **ASKED, echo=True)["choices"][0]
    assert echoed["token_origins"][0]["text_offset"] >= len(PROMPT)
    text = server.complete(IDS, **FIELDS)["choices"][0]["text"]
    stopped = server.complete(IDS, **ASKED, stop=text[10:12], return_token_ids=True)["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["token_origins"]) == len(stopped["token_ids"]) < 40


def test_plain_decoding_for_one_request(server: Server) -> None:
    told = server.complete(IDS, **ASKED, speculation=False)["choices"][0]
    assert {each["origin"] for each in told["token_origins"]} == {"plain"}
    assert told["text"] == server.complete(IDS, **FIELDS)["choices"][0]["text"]


def test_where_there_is_no_place_for_them_they_are_refused(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [FUNCTION], **ASKED}
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", {"input": "x", "return_token_origins": True})):
        status, answer, _ = server.post(path, body)
        assert status == 400 and answer["error"]["param"] == "return_token_origins", path
    assert server.post("/v1/completions", {"prompt": "x", "return_token_origins": "yes"})[0] == 400
