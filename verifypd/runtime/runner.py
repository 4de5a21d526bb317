"""A model, its cache and its attention as one thing that runs passes. Knows tensors; nothing of plans or requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.kernels.base import PagedRows
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
    def forward(self, ids: Tensor, layout: PassLayout, prepared: Any = None) -> Tensor:
        """Hidden states [N, hidden] of one pass; keys and values of its rows are in the cache afterwards.

        prepared: what attention.prepare gave for such a pass, where it must not run here (a graph is being captured).
        """
        return self.model.forward(ids, layout, self.attention, self.cache, prepared)

    @torch.inference_mode()
    def forward_capturing(
        self, ids: Tensor, layout: PassLayout, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `forward`, with the residual streams [N, hidden] after the layers in `capture`."""
        return self.model.forward_capturing(ids, layout, self.attention, self.cache, capture)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, vocab] in fp32."""
        return self.model.logits(hidden)


class HeadRunner:
    """Runs passes of a draft head over its paged cache, and keeps the features it reads in the same blocks.

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

    def keep(self, captured: tuple[Tensor, ...], hidden: Tensor, layout: PassLayout) -> None:
        """Keep what a verifier pass tells of its rows; `layout` is the verifier's, the blocks are the head's.

        Kept as it is and projected when it is read: a pass that nobody drafts from pays for a copy at most.
        """
        self.features.keep((*captured, hidden), self._rows(layout, layout.positions))

    def catch_up(self, ids: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Rows of confirmed tokens, each with the kept feature of the position before it: (normed, stream)."""
        before = (layout.positions - 1).clamp_min(0)
        features = self.model.project(self.features.read(self._rows(layout, before)))
        features = features.masked_fill_((layout.positions == 0)[:, None], 0.0)
        return self.model.read(ids, features, layout, self.attention, self.cache)

    def _rows(self, layout: PassLayout, positions: Tensor) -> PagedRows:
        """These positions of the layout's slots, in the head's own blocks."""
        return PagedRows(self.tables.data, self.features.block_size, layout.slots, layout.row_span, positions)

    def draft(self, ids: Tensor, stream: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Rows of drafted tokens, each with the head's own stream of the row before it: (normed, stream)."""
        return self.model.read(ids, stream, layout, self.attention, self.cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, tokens it may propose] in fp32."""
        return self.model.logits(hidden)
