"""Cuts and verdicts in Triton, for CUDA devices: a few launches in place of the many that torch makes.

Same answers as torch: the same order of cuts, the same ties, the same noise. What may differ is the
last bit of an exponential, and with it a token whose mass or draw lies right on the edge. Knows launches; nothing of
models or schedules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.kernels.launch import launch_early
from verifypd.kernels.tiles import power_of_two
from verifypd.sampling.base import Direct
from verifypd.sampling.case import Case, Verdicts
from verifypd.sampling.draws import block_of
from verifypd.sampling.rows import DraftVocabulary, Rows
from verifypd.sampling.state import Needs, SamplingState
from verifypd.sampling.triton_cuts import cut_rows
from verifypd.sampling.triton_verdicts import judge_rows, judge_spans, propose_rows

CUT_TOKENS = 512  # read at once by a search with sixteen candidates
ROW_TOKENS = 2048  # read at once where one number is wanted
STOPS = 4  # ids that end a request, read at once


class TritonSampling:
    """See SamplingKernels."""

    name = "triton"
    direct: Direct | None = None

    def cut_(self, x: Tensor, rows: Rows, state: SamplingState, needs: Needs, scale: Tensor | None) -> None:
        """See SamplingKernels.cut_."""
        if needs.sampled:
            cut_(x, rows.slots, state, scale)

    def judge(self, case: Case, tokens: Tensor, lengths: Tensor, drafts: Tensor, draft_lens: Tensor) -> Verdicts:
        """See SamplingKernels.judge."""
        return Verdicts.unpacked(judge(case, tokens, lengths, drafts, draft_lens), case.spans.widest + 1)


def cut_(x: Tensor, slots: Tensor, state: SamplingState, scale: Tensor | None = None) -> None:
    """Temperature (times scale [N]), min_p, top_k and top_p of sampled rows of x [N, V], in place; others stay."""
    if not x.shape[0]:
        return
    cut_rows[(x.shape[0],)](
        x,
        slots,
        state.floats,
        state.integers,
        x if scale is None else scale,
        x.stride(0),
        VOCAB=x.shape[1],
        BLOCK=min(CUT_TOKENS, power_of_two(x.shape[1])),
        HEATED=scale is not None,
    )


def propose_(
    x: Tensor, slots: Tensor, depth: int, state: SamplingState, lengths: Tensor, drafts: Tensor, draft_q: Tensor
) -> None:
    """Draft token `depth` of slots [R] (negative: padding) from cut logits x [R, V], into drafts and draft_q."""
    _propose(x, x, None, slots, depth, state, lengths, drafts, draft_q, None)


def draft_(
    logits: Tensor,
    vocabulary: DraftVocabulary | None,
    slots: Tensor,
    depth: int,
    state: SamplingState,
    lengths: Tensor,
    drafts: Tensor,
    draft_q: Tensor,
    scale: Tensor,
) -> None:
    """As `propose_`, from a drafter's logits [R, its vocabulary] as they come, in one launch: widened, cleaned and cut
    with their temperature times scale [S]. vocabulary: None: ids are the verifier's."""
    x = torch.empty(logits.shape[0], state.vocab, device=logits.device)
    _propose(x, logits, vocabulary, slots, depth, state, lengths, drafts, draft_q, scale)


def _propose(
    x: Tensor,
    logits: Tensor,
    vocabulary: DraftVocabulary | None,
    slots: Tensor,
    depth: int,
    state: SamplingState,
    lengths: Tensor,
    drafts: Tensor,
    draft_q: Tensor,
    scale: Tensor | None,
) -> None:
    """scale: None: logits are cut already."""
    vocab = x.shape[1]
    names, places = vocabulary or (state.integers, state.integers)  # not read
    block, blocks, group = _blocks(vocab)
    propose_rows[(x.shape[0],)](
        x,
        logits,
        names,
        places,
        slots,
        lengths,
        drafts,
        draft_q,
        torch.empty(x.shape[0], blocks, device=x.device),
        state.floats,
        state.integers,
        state.floats if scale is None else scale,
        x.stride(0),
        logits.stride(0),
        drafts.stride(0),
        draft_q.stride(0),
        draft_q.stride(1),
        depth,
        VOCAB=vocab,
        KNOWN=min(logits.shape[1], vocab if vocabulary is None else len(names)),
        MAPPED=vocabulary is not None,
        CUT=scale is not None,
        CUT_BLOCK=min(CUT_TOKENS, power_of_two(vocab)),
        ROW=min(ROW_TOKENS, power_of_two(vocab)),
        BLOCK=power_of_two(block),
        BLOCKS=blocks,
        BLOCKS_PADDED=power_of_two(blocks),
        GROUP=group,
        num_warps=8,
        **launch_early(x.device),
    )


def _blocks(vocab: int) -> tuple[int, int, int]:
    """Tokens of a block, blocks, and how many are read at once."""
    block = block_of(vocab)
    blocks = -(-vocab // block)
    return block, blocks, min(ROW_TOKENS // power_of_two(block), power_of_two(blocks))


def judge(case: Case, tokens: Tensor, lengths: Tensor, drafts: Tensor, draft_lens: Tensor) -> Tensor:
    """Verdicts as they are packed for the host, int64 [R, W + 5]; tokens, lengths and life are written.

    W is that of the longest draft there may be, not of this batch: every width would be compiled by itself.
    """
    spans, state, rows = case.spans, case.state, case.rows
    device, count, vocab = case.x.device, len(spans.slot_ids), state.vocab
    number = case.x.shape[0]
    own = torch.empty(number, dtype=torch.int64, device=device)
    stands = torch.empty(number, dtype=torch.int64, device=device)
    scores = torch.empty(number, 3, device=device)
    width = drafts.shape[1] + 1
    packed = torch.empty(count, width + 5, dtype=torch.int64, device=device)
    if not count:
        return packed
    q = case.draft_q if case.draft_q is not None else scores
    q_slot, q_depth = q.stride()[:2]
    drawn = spans.slots if case.drawn is None else case.drawn.long()
    has_q, listed = case.draft_q is not None, case.draft_q is not None and case.drawn is not None
    judge_rows[(number,)](
        case.x,
        case.logits,
        rows.slots,
        rows.depths,
        spans.row_span,
        lengths,
        drafts,
        q,
        drawn,
        state.floats,
        state.integers,
        own,
        scores,
        stands,
        case.x.stride(0),
        case.logits.stride(0),
        drafts.stride(0),
        min(spans.widest, drafts.shape[1]),
        q_slot,
        q_depth,
        VOCAB=vocab,
        BLOCK=min(ROW_TOKENS, power_of_two(vocab)),
        HAS_Q=has_q,
        LISTED=listed,
        num_warps=8,
    )
    block, blocks, group = _blocks(vocab)
    judge_spans[(count,)](
        case.x,
        own,
        scores,
        stands,
        torch.empty(count, blocks, device=device),
        spans.slots,
        spans.first_row,
        spans.drafted,
        tokens,
        lengths,
        drafts,
        draft_lens,
        q,
        drawn,
        state.floats,
        state.integers,
        state.stop_ids,
        state.alive.view(torch.uint8),
        packed,
        case.x.stride(0),
        tokens.stride(0),
        drafts.stride(0),
        state.stop_ids.stride(0),
        case.needs.stop_width,
        q_slot,
        q_depth,
        VOCAB=vocab,
        BLOCK=power_of_two(block),
        BLOCKS=blocks,
        BLOCKS_PADDED=power_of_two(blocks),
        GROUP=group,
        WIDTH=width,
        WIDTH_PADDED=power_of_two(width),
        STOPS=STOPS,
        HAS_Q=has_q,
        LISTED=listed,
    )
    return packed
