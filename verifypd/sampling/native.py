"""Sampling in C, on a CPU: verdicts in one call where torch takes some thirty; where a top_p cut lies; noise.

All of it is what torch gives, to the bit.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_ssize_t, c_void_p

import torch
from torch import Tensor

from verifypd.sampling.case import Case, Outcome, Spans, Verdicts
from verifypd.sampling.cuts import cut_
from verifypd.sampling.native_draws import functions, top_p_threshold
from verifypd.sampling.rows import Rows
from verifypd.sampling.state import Needs, SamplingState
from verifypd.sampling.torch import TorchSampling, outcome, own_choice


class NativeSampling(TorchSampling):
    """torch draws; C says where a top_p cut lies, makes of draws what is emitted, and writes it."""

    name = "native"

    def __init__(self) -> None:
        self.greedy = greedy

    def cut_(self, x: Tensor, rows: Rows, state: SamplingState, needs: Needs, scale: Tensor | None) -> None:
        """See SamplingKernels.cut_."""
        cut_(x, rows, state, needs, scale, top_p_threshold)

    def judge(self, case: Case, tokens: Tensor, lengths: Tensor, drafts: Tensor, draft_lens: Tensor) -> Verdicts:
        """See SamplingKernels.judge."""
        own, top = own_choice(case)
        told = outcome(case, own, top) if case.needs.rejection or case.needs.synthetic else None
        spans, stops = case.spans, case.needs.stop_width
        return verdicts(spans, case.state, stops, own, top, told, tokens, lengths, drafts, draft_lens)


def greedy(
    logits: Tensor,
    spans: Spans,
    needs: Needs,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
) -> Verdicts | None:
    """See Greedy."""
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        return None
    own, top = likeliest(logits, state.vocab)
    return verdicts(spans, state, needs.stop_width, own, top, None, tokens, lengths, drafts, draft_lens)


class _Arguments(ctypes.Structure):
    """As in native_tokens.h."""

    _fields_ = (
        ("slots", c_void_p), ("depth", c_void_p), ("first_row", c_void_p), ("spans", c_ssize_t), ("widest", c_ssize_t),
        ("accepted", c_void_p), ("following", c_void_p), ("hopeless", c_void_p),
        ("own", c_void_p), ("top", c_void_p),
        ("tokens", c_void_p), ("tokens_stride", c_ssize_t), ("lengths", c_void_p),
        ("drafts", c_void_p), ("drafts_stride", c_ssize_t), ("draft_lens", c_void_p),
        ("stop_ids", c_void_p), ("stop_stride", c_ssize_t), ("stop_width", c_ssize_t),
        ("max_len", c_void_p), ("max_len_stride", c_ssize_t),
        ("alive", c_void_p), ("vocab", c_int64), ("out", c_void_p),
    )  # fmt: skip


def likeliest(logits: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The lowest of the likeliest tokens [N] of each row, and its score [N]: `best` of what `clean` leaves of logits
    [N, >= vocab] float32, rows dense."""
    rows, width = logits.shape
    own, top = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    functions().vpd_best(
        logits.data_ptr(), logits.stride(0), rows, min(width, vocab), top.data_ptr(), own.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return own, top


def verdicts(
    spans: Spans,
    state: SamplingState,
    stop_width: int,
    own: Tensor,
    top: Tensor,
    found: Outcome | None,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
) -> Verdicts:
    """What the spans come to; tokens, lengths and state.alive are written. All tensors as the engine has them: int64
    but for `top` and `alive`, the last dimension dense.

    own, top: the verifier's token of each row [N] and its score; found: where those do not say it all.
    """
    assert spans.widest <= drafts.shape[1]
    out = torch.empty(len(spans.slot_ids), spans.widest + 6, dtype=torch.int64)
    told = found or (None, None, None)
    accepted, following, hopeless = (None if each is None else each.contiguous() for each in told)
    functions().vpd_verdicts(
        byref(
            _Arguments(
                spans.slots.data_ptr(), spans.drafted.data_ptr(), spans.first_row.data_ptr(), len(out), spans.widest,
                _at(accepted), _at(following), _at(hopeless), own.data_ptr(), top.data_ptr(),
                tokens.data_ptr(), tokens.stride(0), lengths.data_ptr(), drafts.data_ptr(), drafts.stride(0),
                draft_lens.data_ptr(), state.stop_ids.data_ptr(), state.stop_ids.stride(0), stop_width,
                state.max_len.data_ptr(), state.max_len.stride(0), state.alive.data_ptr(), state.vocab, out.data_ptr(),
            )
        )
    )  # fmt: skip
    return Verdicts.unpacked(out, spans.widest + 1)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
