"""Verify-PD: exact speculative decoding with a prefill, a decode and a verify lane."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# On aarch64 torch's allocator hands freed memory back to the system after 10 ms, and every pass takes it again, page by
# page. It reads its settings as torch is loaded: whoever imports torch first keeps its own.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # ms

# Threads of one product wait for each other by asking again and again, 300,000 times before they sleep. Where another
# program has a core, one who asks keeps it from the one who is waited for, and passes took ten times as long. Now they
# ask for some 15 µs, a little longer than a pass leaves them idle. One time takes 0.8 ns on ARM, on x86 4 to 50.
os.environ.setdefault("GOMP_SPINCOUNT", "2000" if platform.machine() in ("x86_64", "AMD64") else "20000")

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
