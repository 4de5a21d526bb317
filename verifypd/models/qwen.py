"""Qwen2 and Qwen3. Both compute Llama's block; what differs (biases, norms of q and k) the config and weights carry."""

from __future__ import annotations

from verifypd.models.llama import Llama


class Qwen2(Llama):
    """Biases on q, k and v; windows only where `use_sliding_window` says so."""


class Qwen3(Llama):
    """No biases; q and k are normed per head, and head_dim is free of the hidden size."""
