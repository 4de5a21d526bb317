"""Attention of ragged spans over a paged cache: one protocol, several backends. Knows nothing of models."""

from __future__ import annotations

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.attention.choose import available_backends, backend

__all__ = ["AttentionBackend", "PassLayout", "available_backends", "backend"]
