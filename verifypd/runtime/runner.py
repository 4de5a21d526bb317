"""A model, its cache and its attention as one thing that runs passes. Knows tensors; nothing of plans or requests."""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.kv.pool import KVCache
from verifypd.models.base import Model
from verifypd.runtime.inputs import BlockTables


class ModelRunner:
    """Runs passes of one model over its paged cache."""

    def __init__(self, model: Model, attention: AttentionBackend, cache: KVCache, tables: BlockTables) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.tables = tables

    @torch.inference_mode()
    def forward(self, ids: Tensor, layout: PassLayout) -> Tensor:
        """Hidden states [N, hidden] of one pass; keys and values of its rows are in the cache afterwards."""
        return self.model.forward(ids, layout, self.attention, self.cache)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, vocab] in fp32."""
        return self.model.logits(hidden)
