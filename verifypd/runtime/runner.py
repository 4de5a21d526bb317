"""A model, its cache and its attention as one thing that runs passes. Knows tensors; nothing of plans or requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout, Reader
from verifypd.attention.native import NativeAttention
from verifypd.kernels.weights import FP8
from verifypd.kv.pool import FeatureCache, KVCache
from verifypd.models.base import Model
from verifypd.models.head import DraftHead
from verifypd.models.native_head import NativeLoop
from verifypd.runtime.inputs import BlockTables, Slots
from verifypd.sampling.state import SamplingState


def cache_of(model: Model, blocks: int, block_size: int, fp8: bool = False) -> KVCache:
    """Room for so many blocks of a model's keys and values, as they are computed or in e4m3."""
    shape, dtype = model.config, FP8 if fp8 else model.activation_dtype
    return KVCache(shape.layers, blocks, block_size, shape.kv_heads, shape.head_dim, dtype, model.device)


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

    def calibrate(self, ids: Tensor) -> None:
        """Give a cache in e4m3, which is empty, the scales of a text: ids [N], read with keys and values in full."""
        empty, rows = self.cache, len(ids)
        width = -(-rows // empty.block_size)
        slot = torch.zeros(1, dtype=torch.int64, device=ids.device)
        table = torch.arange(1, width + 1, dtype=torch.int32, device=ids.device)[None]
        layout = PassLayout.build((rows,), (rows,), slot, slot.clone(), table, empty.block_size)
        self.cache = cache_of(self.model, width + 1, empty.block_size)
        try:
            self.forward(ids, layout)
            empty.take_scales(self.cache.fitting_scales())
        finally:
            self.cache = empty

    def catch_up(self, ids: Tensor, layout: PassLayout, prepared: Any = None) -> tuple[Tensor, Tensor]:
        """As a drafter, rows of confirmed tokens: hidden states for the logits, and what the next step reads beside its
        token, which of a model is nothing."""
        hidden = self.forward(ids, layout, prepared)
        return hidden, hidden

    def draft(self, ids: Tensor, carried: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """As a drafter, a row of each drafted token; the same result."""
        return self.catch_up(ids, layout)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, vocab] in fp32."""
        return self.model.logits(hidden)

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """The same in the dtype they are computed in."""
        return self.model.raw_logits(hidden)

    def close(self) -> None:
        """Free what is not this process's own, which of a model in one place is nothing."""


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

    def native_loop(self, slots: Slots, sampling: SamplingState) -> NativeLoop | None:
        """The whole draft loop in one call; None: not with this head, or these kernels."""
        head, tables, vocab_map = self.model.native_head, self.tables, self.model.vocab_map
        capped = self.model.config.logit_softcap is not None
        if head is None or vocab_map is None or capped or not isinstance(self.attention, NativeAttention):
            return None
        return NativeLoop(
            head, self.cache, tables.data, tables.first, self.features.data, vocab_map, sampling, tokens=slots.tokens,
            lengths=slots.lengths, drafts=slots.drafts, draft_lens=slots.draft_lens, draft_q=slots.draft_q,
            heat=slots.draft_temperatures,
        )  # fmt: skip

    def catch_up(self, ids: Tensor, layout: PassLayout, prepared: Any = None) -> tuple[Tensor, Tensor]:
        """Rows of confirmed tokens, each with the kept feature of the position before it: (normed, carried)."""
        return self.model.read(ids, self.features.before(layout), layout, self.attention, self.cache, prepared)

    def draft(self, ids: Tensor, carried: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Rows of drafted tokens, each with what the head carried from the row before it: (normed, carried)."""
        return self.model.read(ids, carried, layout, self.attention, self.cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, tokens it may propose] in fp32."""
        return self.model.logits(hidden)

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """The same in the dtype they are computed in."""
        return self.model.raw_logits(hidden)
