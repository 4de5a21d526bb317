"""Verify-PD: exact speculative decoding with a prefill, a decode and a verify lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from verifypd.engine.llm import LLM
    from verifypd.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "verifypd.engine.llm",
    "SamplingParams": "verifypd.request",
    "RequestOutput": "verifypd.request",
    "CompletionOutput": "verifypd.request",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `verifypd --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'verifypd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
