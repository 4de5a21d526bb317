"""A model, its cache and its attention as one thing that runs passes. Knows tensors; nothing of plans or requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout, Reader
from verifypd.kv.pool import FeatureCache, KVCache
from verifypd.models.base import Model
from verifypd.models.head import DraftHead
from verifypd.runtime.inputs import BlockTables


class ModelRunner:
    """Runs passes of one model over its paged cache."""

    def __init__(self, model: Model, attention: AttentionBackend, cache: KVCache, tables: BlockTables) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.tables = tables

    @torch.inference_mode()
    def forward(self, ids: Tensor, layout: PassLayout, prepared: Any = None, reader: Reader | None = None) -> Tensor:
        """Hidden states [N, hidden] of one pass; keys and values of its rows are in the cache afterwards.

        prepared: what attention.prepare gave for such a pass, where it must not run here (a graph is being captured).
        reader: gets what it reads of the pass.
        """
        return self.model.forward(ids, layout, self.attention, self.cache, prepared, reader)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, vocab] in fp32."""
        return self.model.logits(hidden)


class HeadRunner:
    """Runs passes of a draft head over its paged cache, and reads its features from the same blocks.

    Callers hold torch.inference_mode(): entered again for every pass, it shows in the time of a draft step on a CPU.
    """

    def __init__(
        self,
        model: DraftHead,
        attention: AttentionBackend,
        cache: KVCache,
        tables: BlockTables,
        features: FeatureCache,
    ) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.tables = tables
        self.features = features

    def catch_up(self, ids: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Rows of confirmed tokens, each with the kept feature of the position before it: (normed, stream)."""
        before = (layout.positions - 1).clamp_min(0)
        kept = self.features.read(layout, before).tensor_split(len(self.features.layers) + 1, -1)
        features = self.model.project(kept[: self.model.streams])
        features = features.masked_fill_((layout.positions == 0)[:, None], 0.0)
        return self.model.read(ids, features, layout, self.attention, self.cache)

    def draft(self, ids: Tensor, stream: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Rows of drafted tokens, each with the head's own stream of the row before it: (normed, stream)."""
        return self.model.read(ids, stream, layout, self.attention, self.cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, tokens it may propose] in fp32."""
        return self.model.logits(hidden)
