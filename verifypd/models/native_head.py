"""A draft head in calls of C: its features, its rows, and the weights that a whole draft loop reads.

Knows weights and a pass's layout; what it computes is what models/head.py does, operation by operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int64, c_ssize_t, c_void_p, pointer

import torch
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.kernels import build
from verifypd.kernels.native import TYPES, NativeKernels
from verifypd.kernels.weights import Weight
from verifypd.kv.pool import KVCache
from verifypd.models.native import Matrix, NativeLayers, Vector, matrix, values_of, vector
from verifypd.sampling.native import Draw
from verifypd.sampling.state import SamplingState


class _Head(ctypes.Structure):
    _fields_ = (
        ("embedding", Matrix), ("fc", Matrix), ("output", Matrix), ("embed_norm", Vector), ("hidden_norm", Vector),
        ("layers", c_void_p), ("shape", c_void_p), ("count", c_ssize_t), ("embed_scale", c_float),
    )  # fmt: skip


class PagedCache(ctypes.Structure):
    """Keys and values of the head's layers, and the table of their blocks."""

    _fields_ = (
        ("data", c_void_p), ("layer_bytes", c_ssize_t), ("value_bytes", c_ssize_t), ("type", c_int64),
        ("table", c_void_p), ("table_stride", c_ssize_t), ("slots", c_ssize_t), ("blocks", c_ssize_t),
        ("block_size", c_ssize_t), ("first", c_void_p),
    )  # fmt: skip

    @classmethod
    def of(cls, cache: KVCache, table: Tensor, first: Tensor | None) -> PagedCache:
        """table: int32 [slots, blocks a row]; first: see PassLayout."""
        data = cache.data
        size = data.element_size()
        return cls(
            data.data_ptr(), data.stride(0) * size, data.stride(1) * size, TYPES[data.dtype], table.data_ptr(),
            table.stride(0), *table.shape, cache.block_size, None if first is None else first.data_ptr(),
        )  # fmt: skip


class NativeHead:
    """A head as C reads it. Its tensors must stay where they are: the structs hold their addresses."""

    def __init__(
        self,
        layers: NativeLayers,
        kernels: NativeKernels,
        *,
        embedding: Weight,
        embed_scale: float | None,
        embed_norm: Tensor,
        hidden_norm: Tensor,
        fc: Weight,
        output: Weight,
        feature_norms: Sequence[Tensor],
        features: Weight,
        eps: float,
    ) -> None:
        loaded = build.library()
        assert loaded is not None  # the kernels come from it
        self._read, self._project = loaded.vpd_read, loaded.vpd_project
        self._layers, self._kernels = layers, kernels
        self._held = (embedding, embed_norm, hidden_norm, fc, output, tuple(feature_norms), features)
        self._types = {values_of(weight).dtype for weight in (fc, output, features)}
        self._norms = (Vector * len(feature_norms))(*map(vector, feature_norms))
        self._features = matrix(features, None)
        self._eps = eps
        structs, shape, count = layers.described
        self._structs = structs, shape
        self.struct = _Head(
            matrix(embedding, None), matrix(fc, None), matrix(output, None), vector(embed_norm), vector(hidden_norm),
            ctypes.addressof(structs), ctypes.addressof(shape), count, 1.0 if embed_scale is None else embed_scale,
        )  # fmt: skip

    def takes(self, rows: int) -> bool:
        """Whether the kernels would compute all of so many rows in C."""
        return self._layers.takes(rows) and not any(self._kernels.leaves(rows, dtype) for dtype in self._types)

    def project(self, streams: Sequence[Tensor]) -> Tensor:
        """See DraftHead.project; streams [N, H] float32."""
        streams = [stream.contiguous() for stream in streams]
        rows, width = streams[0].shape
        made = torch.empty(rows, self._features.out)
        places = (c_void_p * len(streams))(*[stream.data_ptr() for stream in streams])
        if self._project(
            places, self._norms, len(streams), width, self._eps, byref(self._features), made.data_ptr(), rows,
            torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError("no memory for the working space of features")
        return made

    def read(self, ids: Tensor, features: Tensor, layout: PassLayout, cache: KVCache) -> tuple[Tensor, Tensor]:
        """See DraftHead.read; features [N, H] float32."""
        ids, features = ids.contiguous(), features.contiguous()
        rows, width = features.shape
        x, stream = torch.empty(2, rows, width).unbind(0)
        failed = self._read(
            byref(self.struct), ids.data_ptr(), features.data_ptr(), stream.data_ptr(), x.data_ptr(),
            layout.positions.data_ptr(), byref(PagedCache.of(cache, layout.block_table, layout.first)),
            layout.write_index.data_ptr(), layout.row_offsets.data_ptr(), layout.slots.data_ptr(),
            layout.starts.data_ptr(), rows, layout.spans, torch.get_num_threads(),
        )  # fmt: skip
        raise_if(failed)
        return x, stream


class _Loop(ctypes.Structure):
    _fields_ = (
        ("head", POINTER(_Head)), ("cache", POINTER(PagedCache)), ("spans", c_void_p), ("count", c_ssize_t),
        ("tokens", c_void_p), ("tokens_stride", c_ssize_t), ("lengths", c_void_p),
        ("draft_lens", c_void_p), ("features", c_void_p), ("draw", POINTER(Draw)), ("threads", c_int64),
    )  # fmt: skip


class NativeLoop:
    """The draft loop of a head in one call: each step reads the token that the step before drew.

    What it reads and writes stays where it is.
    """

    def __init__(
        self,
        head: NativeHead,
        cache: KVCache,
        table: Tensor,
        first: Tensor | None,
        features: Tensor,
        vocab_map: Tensor,
        sampling: SamplingState,
        *,
        tokens: Tensor,
        lengths: Tensor,
        drafts: Tensor,
        draft_lens: Tensor,
        draft_q: Tensor | None,
        heat: Tensor,
    ) -> None:
        """table: of the head's blocks; features: as kept of the verifier, [pool rows, H] float32; vocab_map: [V], the
        verifier's id of each token that may be proposed; heat: of the drafter; the
        others as Slots has them."""
        loaded = build.library()
        assert loaded is not None
        self._run = loaded.vpd_draft
        self.takes = head.takes  # whether so many rows are C's
        self._held = (
            head, cache, table, first, features, vocab_map, sampling, tokens, lengths, drafts, draft_lens, draft_q, heat
        )  # fmt: skip
        self._draw = Draw.of(sampling, len(vocab_map), lengths, drafts, draft_q, heat, vocab_map)
        self._cache = PagedCache.of(cache, table, first)
        self._loop = _Loop(
            pointer(head.struct), pointer(self._cache), None, 0, tokens.data_ptr(), tokens.stride(0),
            lengths.data_ptr(), draft_lens.data_ptr(), features.data_ptr(), pointer(self._draw), 0,
        )  # fmt: skip

    def run(self, spans: Sequence[tuple[int, int, int, int]]) -> None:
        """Of each span slot, rows, drafts and where its rows start (negative: so far before the end); longest drafts
        first."""
        given = (c_int64 * (4 * len(spans)))(*[number for span in spans for number in span])
        self._loop.spans, self._loop.count = ctypes.addressof(given), len(spans)
        self._loop.threads = torch.get_num_threads()
        raise_if(self._run(byref(self._loop)))


def raise_if(failed: int) -> None:
    """What C returns for rows of a head."""
    if failed == 1:
        raise MemoryError("no memory for the working space of a draft head")
    if failed:
        raise IndexError("a row of the pass lies outside its slot's block table, or a token outside the vocabulary")
