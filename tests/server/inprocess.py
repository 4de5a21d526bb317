"""The API in this process, with an engine that only listens, or that says what a test makes up. No sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.testclient import TestClient

from verifypd.config import EngineConfig
from verifypd.server.app import make_app
from verifypd.server.bridge import Bridge
from verifypd.server.config import ServerConfig
from verifypd.server.messages import Answer, Down, Output, Outputs, Submit, ToEngine, Up
from verifypd.tokenizer import Tokenizer

INFO = {"max_model_len": 20_000, "vocab": 384, "max_draft": 0}
PATIENCE = 20.0  # s until an engine that nobody gives up on is lost


def connected(tokenizer: Tokenizer | None) -> tuple[Bridge, list[Any]]:
    """A bridge to an engine that only listens, and what it hears."""
    heard: list[Any] = []
    bridge = Bridge(0, tokenizer, retries=2)
    bridge.connect = lambda address: heard.append
    bridge.take(Up(1, "here", INFO))
    return bridge, heard


def answering(tokenizer: Tokenizer | None, tokens: list[int], finish: str | None) -> tuple[Bridge, list[Any]]:
    """A bridge to an engine that lets every call in, and gives it these tokens; without `finish` it hangs then."""
    bridge, heard = connected(tokenizer)

    def hear(message: ToEngine) -> None:
        heard.append(message)
        if isinstance(message, Submit):
            loop = asyncio.get_running_loop()
            loop.call_soon(bridge.take, Answer(1, message.call))
            news = Outputs(1, [Output(message.call, 0, tokens, finish, None, [])])
            loop.call_later(0.01, lambda: (bridge.take(news), bridge.flush()))
            loop.call_later(PATIENCE, bridge.take, Down(1, "nobody gave up on it", final=True))

    bridge.connect = lambda address: hear
    bridge.take(Down(1, "another comes"))
    bridge.take(Up(1, "here", INFO))
    return bridge, heard


def api(tokenizer: Tokenizer, bridge: Bridge | None = None, **settings: Any) -> TestClient:
    """A client of the app, with these settings of the server."""
    bridge = bridge or connected(tokenizer)[0]
    config = EngineConfig(model="tiny")
    return TestClient(make_app(config, ServerConfig(**settings), bridge, tokenizer, lambda: None, lambda: None))
