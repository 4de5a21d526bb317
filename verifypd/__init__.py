"""Verify-PD: exact speculative decoding with a prefill, a decode and a verify lane."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# On aarch64 torch's allocator hands freed memory back to the system after 10 ms, and every pass takes it again, page by
# page. It reads its settings as torch is loaded: whoever imports torch first keeps its own.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # ms

if TYPE_CHECKING:
    from verifypd.control.architectures import select_architecture
    from verifypd.engine.async_llm import AsyncLLM
    from verifypd.engine.llm import LLM
    from verifypd.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__", "select_architecture",
]  # fmt: skip

_HOMES = {
    "LLM": "verifypd.engine.llm",
    "AsyncLLM": "verifypd.engine.async_llm",
    "SamplingParams": "verifypd.request",
    "RequestOutput": "verifypd.request",
    "CompletionOutput": "verifypd.request",
    "select_architecture": "verifypd.control.architectures",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `verifypd --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'verifypd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
