"""What the tests ask of a server that they break: prompts, and bodies of requests."""

from __future__ import annotations

from typing import Any

from tests.server.clients import together
from tests.server.serving import Server

PROMPTS = [[5 + 3 * i, 9, 200 - i, 31, 7, 9, 200 - i, 31] for i in range(12)]
CONNECTIONS = 48  # a worker of the frail server keeps open
LONG: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "ignore_eos": True}


def body(index: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[index], **LONG, **more}


def all_at_once(server: Server) -> list[str]:
    """The text of every prompt, all asked for together."""
    return together([lambda i=i: server.complete(PROMPTS[i], **LONG)["choices"][0]["text"] for i in range(12)])
