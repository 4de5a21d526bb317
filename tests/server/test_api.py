"""The API in this process, for what a whole server would not show: threads, an engine that hangs, a broken part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.inprocess import answering, api
from tests.server.serving import events
from verifypd.server.messages import Abort
from verifypd.server.reader import LARGE
from verifypd.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("server")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_hears_of_its_deadline_from_a_worker_whose_engine_hangs(tokenizer: Tokenizer, stream: bool) -> None:
    bridge, heard = answering(tokenizer, [70, 71], None)
    body = {"prompt": [5, 6], "deadline_ms": 500, "stream": stream}
    with api(tokenizer, bridge) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    parts = [part["choices"][0] for part in events(answer.text)] if stream else answer.json()["choices"]
    assert "".join(part["text"] for part in parts) == tokenizer.decode([70, 71])
    assert parts[-1]["finish_reason"] == "deadline"
    assert isinstance(heard[-1], Abort) and heard[-1].reason == "deadline"


# -- beside the event loop ---------------------------------------------------------------------------------------------


@pytest.fixture
def threads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In which threads text was tokenised or put together."""
    found: list[int] = []

    def noting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **kwargs: Any) -> Any:
            found.append(threading.get_ident())
            return inner(*args, **kwargs)

        return work

    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, name, noting(getattr(tokenizer, name)))
    return found


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("path", "small", "large"),
    [
        ("/tokenize", {"prompt": "a"}, {"prompt": "a " * LARGE}),
        ("/tokenize", {"messages": said("a")}, {"messages": said("a " * LARGE), "return_token_strs": True}),
        ("/detokenize", {"tokens": [70]}, {"tokens": [70] * (LARGE // 2)}),
    ],
)
def test_long_texts_are_tokenised_in_another_process(
    tokenizer: Tokenizer, threads: list[int], path: str, small: Any, large: Any
) -> None:
    with api(tokenizer) as client:
        assert client.post(path, json=small).status_code == 200
        assert client.post(path, json=large).status_code == 200
        assert client.portal is not None
        loop = client.portal.call(threading.get_ident)
    assert threads == [loop], "the small one, and nothing else"


def test_no_other_origin_unless_asked(tokenizer: Tokenizer) -> None:
    with api(tokenizer) as client:
        answer = client.get("/health", headers={"Origin": "https://app.example"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_tokens_have_the_limits_of_prompts(tokenizer: Tokenizer) -> None:
    with api(tokenizer) as client:
        for tokens in ([70] * 20_000, [384]):
            answer = client.post("/detokenize", json={"tokens": tokens})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"
        assert client.post("/detokenize", json={"tokens": [70] * 19_999}).status_code == 200


def test_a_request_that_breaks_something_is_told_in_the_shape_of_all_errors(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(tokenizer, "encode", broken)
    with api(tokenizer) as client:
        answer = client.post("/tokenize", json={"prompt": "a"}, headers={"X-Request-Id": "r7"})
        assert client.get("/health").status_code == 200
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "r7"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error") and "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text
    line = next(record for record in caplog.records if record.getMessage() == "request")
    assert line.levelname == "WARNING" and line.__dict__["fields"]["code"] == "internal_error"


@pytest.mark.parametrize(("words", "status"), [([" "], 200), (["ab", " "], 200), (["xyz" * 100], 400)])
def test_bad_words_reach_the_engine_short_and_not_empty(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int
) -> None:
    """Of some tokenizers a space leaves nothing. A word too long is refused before the engine hears of it."""
    inner = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: inner(text.strip(), **more) if text.strip() else [])
    bridge, heard = answering(tokenizer, [70], "length")
    with api(tokenizer, bridge) as client:
        answer = client.post("/v1/completions", json={"prompt": [5], "bad_words": words})
    assert answer.status_code == status
    if status == 200:
        assert heard[0].bad_words == [inner("ab", add_special_tokens=False)] * 2 * (len(words) - 1)
    else:
        assert answer.json()["error"]["param"] == "bad_words" and not heard
