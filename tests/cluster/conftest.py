"""The tiny pair of the server's tests, for tests of clusters."""

from __future__ import annotations

from tests.server.conftest import folders, tokenizer

__all__ = ["folders", "tokenizer"]
