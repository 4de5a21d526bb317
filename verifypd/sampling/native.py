"""Sampling in C, on a CPU: all that becomes of logits, from the temperature to the verdict, in one call.

Coupled and greedy tokens are torch's, to the bit; what is drawn by weight has the same law, and but for the rounding of
a float the same tokens. Where rounding decides a coupled draw, torch judges that span, and no other: what becomes of a
request does not depend on who else is in the pass.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int64, c_ssize_t, c_void_p

import torch
from torch import Tensor

from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.sampling.base import Again
from verifypd.sampling.case import Spans, Verdicts
from verifypd.sampling.state import Needs, SamplingState
from verifypd.sampling.torch import TorchSampling

CLOSE = 2  # what vpd_judge returns where rounding decides


@functools.cache
def functions() -> ctypes.CDLL:
    """Those of native.c."""
    loaded = build.library()
    if loaded is None:
        raise ConfigError("--sampler native needs a C compiler: install gcc or clang, or use --sampler torch")
    return loaded


class NativeSampling(TorchSampling):
    """C judges; torch where C does not."""

    name = "native"

    def __init__(self) -> None:
        functions()
        self.direct = judge


class Draw(ctypes.Structure):
    """draw_args in native_sampling.h."""

    _fields_ = (
        ("floats", c_void_p), ("integers", c_void_p), ("lengths", c_void_p), ("heat", c_void_p),
        ("drafts", c_void_p), ("drafts_stride", c_ssize_t),
        ("q", c_void_p), ("q_slot", c_ssize_t), ("q_depth", c_ssize_t),
        ("ids", c_void_p), ("known", c_ssize_t), ("vocab", c_ssize_t),
    )  # fmt: skip

    @classmethod
    def of(
        cls,
        state: SamplingState,
        known: int,
        lengths: Tensor,
        drafts: Tensor,
        draft_q: Tensor | None,
        heat: Tensor | None,
        vocab_map: Tensor | None,
    ) -> Draw:
        """Of `propose`'s arguments, whose memory must outlive it; known: columns of the logits that count."""
        return cls(
            *_settings(state), lengths.data_ptr(), _at(heat), drafts.data_ptr(), drafts.stride(0),
            *_distributions(draft_q), _at(vocab_map), known, state.vocab,
        )  # fmt: skip


def propose_(
    x: Tensor,
    slots: Tensor,
    depth: int,
    state: SamplingState,
    lengths: Tensor,
    drafts: Tensor,
    draft_q: Tensor | None,
    heat: Tensor | None,
    vocab_map: Tensor | None,
) -> None:
    """Cut, draw and write draft token `depth` of slots [R], and its distribution, from x [R, draft vocab] that no cut
    has seen; the rest as in `propose`."""
    x = _rows(x)
    known = min(x.shape[1], state.vocab if vocab_map is None else len(vocab_map))
    draw = Draw.of(state, known, lengths, drafts, draft_q, heat, vocab_map)
    if functions().vpd_propose(
        byref(draw), slots.data_ptr(), len(slots), depth, x.data_ptr(), x.stride(0), torch.get_num_threads()
    ):
        raise MemoryError("no memory for the working space of a draft token")


class _Verdicts(ctypes.Structure):
    """verdict_args in native_tokens.h."""

    _fields_ = (
        ("slots", c_void_p), ("depth", c_void_p), ("first_row", c_void_p), ("spans", c_ssize_t), ("widest", c_ssize_t),
        ("tokens", c_void_p), ("tokens_stride", c_ssize_t), ("lengths", c_void_p),
        ("drafts", c_void_p), ("drafts_stride", c_ssize_t), ("draft_lens", c_void_p),
        ("stop_ids", c_void_p), ("stop_stride", c_ssize_t), ("stop_width", c_ssize_t),
        ("max_len", c_void_p), ("max_len_stride", c_ssize_t),
        ("alive", c_void_p), ("vocab", c_int64), ("out", c_void_p),
    )  # fmt: skip


class _Judge(ctypes.Structure):
    """judge_args in native_sampling.h."""

    _fields_ = (
        ("x", c_void_p), ("stride", c_ssize_t), ("width", c_ssize_t), ("floats", c_void_p), ("integers", c_void_p),
        ("q", c_void_p), ("q_slot", c_ssize_t), ("q_depth", c_ssize_t), ("by_weight", c_char_p),
        ("emitted", _Verdicts), ("close", c_char_p), ("threads", c_int64),
    )  # fmt: skip


def judge(
    x: Tensor,
    spans: Spans,
    needs: Needs,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
    draft_q: Tensor | None,
    by_weight: Sequence[bool],
    again: Again,
) -> Verdicts | None:
    """See Direct. Tensors as the engine has them: int64 but for `x`, `draft_q` and `state.alive`, the last dimension
    dense."""
    if draft_q is not None and draft_q.dtype is not torch.float32:
        return None
    assert spans.widest <= drafts.shape[1]
    x = _rows(x)
    out = torch.empty(len(spans.slot_ids), spans.widest + 6, dtype=torch.int64)
    close = ctypes.create_string_buffer(len(out))
    given = _Judge(
        x.data_ptr(), x.stride(0), min(x.shape[1], state.vocab), *_settings(state), *_distributions(draft_q),
        bytes(by_weight),
        _Verdicts(
            spans.slots.data_ptr(), spans.drafted.data_ptr(), spans.first_row.data_ptr(), len(out), spans.widest,
            tokens.data_ptr(), tokens.stride(0), lengths.data_ptr(), drafts.data_ptr(), drafts.stride(0),
            draft_lens.data_ptr(), state.stop_ids.data_ptr(), state.stop_ids.stride(0), needs.stop_width,
            state.max_len.data_ptr(), state.max_len.stride(0), state.alive.data_ptr(), state.vocab, out.data_ptr(),
        ),
        ctypes.cast(close, c_char_p), torch.get_num_threads(),
    )  # fmt: skip
    told = functions().vpd_judge(byref(given))
    if told & ~CLOSE:
        raise MemoryError("no memory for the working space of a verdict")
    if told:
        some = [r for r, each in enumerate(close.raw) if each]
        out[some, :3] = torch.stack(tuple(each.long() for each in again(some)), 1)
        functions().vpd_emit(byref(given.emitted))
    return Verdicts.unpacked(out, spans.widest + 1)


def _rows(x: Tensor) -> Tensor:
    """As C reads them: float32, each row dense."""
    return x if x.dtype is torch.float32 and x.stride(1) == 1 else x.float().contiguous()


def _settings(state: SamplingState) -> tuple[int, int]:
    return state.floats.data_ptr(), state.integers.data_ptr()


def _distributions(draft_q: Tensor | None) -> tuple[int | None, int, int]:
    return (None, 0, 0) if draft_q is None else (draft_q.data_ptr(), draft_q.stride(0), draft_q.stride(1))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
