"""Paged attention by FlashInfer, where it is installed: CUDA, bfloat16 and float16. Knows plans; nothing of models.

One wrapper of ragged, causal spans serves plain tokens, verify spans and prompt chunks; it reads the engine's blocks in
place. FlashInfer cuts a pass into work on the host, from the exact length of every context, and those live on the
device: `prepare` waits for them, once a pass. Steps are therefore not asynchronous with this backend, and its passes
are never captured. It is here to be compared with; "triton" is the backend to serve with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifypd.attention.base import PassLayout, Rotary
from verifypd.attention.triton import rotate_and_write_rows, write_rows
from verifypd.errors import ConfigError
from verifypd.kv.pool import LayerCache

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128, 256)  # of a head
FLOATS = 256 << 20  # bytes of partial results that spans with split contexts may take
STREAM_BYTES = FLOATS + (64 << 20)  # on the device, for each stream: those, and 8 MiB of plan for each kind of layer
KERNELS = "fa2"  # the ones that pack the query heads of a key head, for any compute capability from 8.0 on


@dataclass(frozen=True, slots=True)
class Kind:
    """What FlashInfer compiles a kernel for and plans with: layers of a kind share the plan of a pass."""

    stream: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """A pass in FlashInfer's terms: B runs of rows, each with the blocks it reads.

    Void rows are runs of their own, over one token that means nothing: a run that holds real rows must not have more
    rows than tokens, for FlashInfer finds where its mask begins by unsigned differences of the two.
    """

    stream: int
    rows: Tensor  # [B+1] int32 on the host, first row of each run
    blocks: Tensor  # [B+1] int32 on the host, first of its blocks in `listed`
    last: Tensor  # [B] int32 on the host, tokens in its last block
    listed: Tensor  # [blocks of all runs] int32


def check_model(dtype: torch.dtype, width: int) -> None:
    """Refuse what FlashInfer has no kernel for, before any weight is loaded."""
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"--attention flashinfer computes in bfloat16 or float16, not in {name}; use --dtype bfloat16 or"
            " --attention triton"
        )
    if width not in WIDTHS:
        raise ConfigError(
            f"--attention flashinfer takes heads of {', '.join(map(str, WIDTHS))} elements, and this model's have"
            f" {width}; use --attention triton"
        )


class FlashInferAttention:
    """bfloat16 and float16; sums in float32. How a context is split depends on the other spans of the pass."""

    name = "flashinfer"
    rotates = True
    written = None

    def __init__(self) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._make = BatchPrefillWithPagedKVCacheWrapper
        self._floats: dict[int, Tensor] = {}  # by stream: passes of different streams may overlap
        self._wrappers: dict[Kind, Any] = {}
        self._planned: dict[Kind, Spans] = {}  # what each wrapper was last planned for

    def prepare(self, layout: PassLayout) -> Spans:
        """Wait for the lengths of the spans, and list the blocks they read. Plans follow with the first layer."""
        device = layout.starts.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return spans_of(layout, _known(layout.starts), stream)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        layout: PassLayout,
        prepared: Spans,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See AttentionBackend.attend. Views of a fused qkv are read in place."""
        rows, heads, width = q.shape
        if not rows:
            return torch.empty_like(q)
        q, k, v = (x if x.stride(1) == width and x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        kind = Kind(prepared.stream, heads, k.shape[1], width, q.dtype, scale, window, softcap)
        if self._planned.get(kind) is not prepared:
            self._plan(kind, prepared, layout)
        if rotary is None:
            write_rows(k, v, cache, layout)
        else:
            q = rotate_and_write_rows(q, k, v, cache, layout, rotary)
        out: Tensor = self._wrappers[kind].run(q, (cache.k, cache.v))
        return out

    def _plan(self, kind: Kind, spans: Spans, layout: PassLayout) -> None:
        device = layout.starts.device
        if kind not in self._wrappers:
            if kind.stream not in self._floats:
                self._floats[kind.stream] = torch.empty(FLOATS, dtype=torch.uint8, device=device)
            log.info("FlashInfer loads its kernel for %s; the first time it compiles it, which takes a minute", kind)
            self._wrappers[kind] = self._make(self._floats[kind.stream], "NHD", backend=KERNELS)
        self._wrappers[kind].plan(
            spans.rows,
            spans.blocks,
            spans.listed,
            spans.last,
            kind.heads,
            kind.kv_heads,
            kind.width,
            layout.block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,  # theirs does not count the row's own position
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
        self._planned[kind] = spans


def _known(starts: Tensor) -> list[int]:
    """Where spans start, on the host: the wait of this backend."""
    found: list[int] = starts.tolist()
    return found


def spans_of(layout: PassLayout, starts: Sequence[int], stream: int = 0) -> Spans:
    """The runs of a pass whose spans start there."""
    runs: list[tuple[int, int, int]] = []  # (span, rows, tokens of context)
    for r, (start, rows) in enumerate(zip(starts, layout.span_rows, strict=True)):
        void = min(max(-start, 0), rows)
        if void:
            runs.append((r, void, 1))
        if rows > void:
            runs.append((r, rows - void, start + rows))
    span, rows_of, tokens = np.array(runs, dtype=np.int32).reshape(-1, 3).T
    counts = -(-tokens // layout.block_size)
    ends = np.cumsum(counts, dtype=np.int32)
    run_of = np.repeat(np.arange(len(runs)), counts)
    place = np.stack((span[run_of], np.arange(len(run_of)) - (ends - counts)[run_of]))  # [2, blocks] span, block of it
    where = torch.from_numpy(place.astype(np.int64))
    if layout.starts.is_cuda:
        where = where.pin_memory().to(layout.starts.device, non_blocking=True)
    return Spans(
        stream=stream,
        rows=torch.from_numpy(np.concatenate(([0], np.cumsum(rows_of))).astype(np.int32)),
        blocks=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        last=torch.from_numpy((tokens - (counts - 1) * layout.block_size).astype(np.int32)),
        listed=layout.block_table[layout.slots[where[0]], where[1]],
    )
