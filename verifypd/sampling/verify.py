"""Verification: which drafted tokens stand, the token that follows them, and whether the request ends there.

Every decision is made on the device, for all spans at once; what is vocabulary-wide stays ragged over the rows, only
scalars are padded. Randomness comes in as an argument or from the slot's keyed noise. Knows nothing of models, KV
memory or schedules.

Exactness. Rejection: a draft x stands with probability min(1, p(x) / q(x)), else the token comes from norm(max(p - q,
0)); after the last draft it comes from p. Coupled: the token is argmax(log p + Gumbel noise of the output position),
drafts or not, and a draft stands when it is that token. Greedy: the same without noise. p is the transformed
distribution, q what the drafter drew from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from verifypd.sampling.draws import best, best_with_noise, draw, noise_keys
from verifypd.sampling.logprobs import Logprobs, padded, token_logprobs
from verifypd.sampling.philox import Role, uniform, uniforms
from verifypd.sampling.state import Needs, SamplingState, Subset, on_device
from verifypd.sampling.transforms import Rows, clean, transform


class Finish(IntEnum):
    """Why a request ends with a verdict."""

    RUNNING = 0
    STOP = 1  # EOS or a stop id
    LENGTH = 2
    ERROR = 3  # no token has any probability


@dataclass(frozen=True, slots=True)
class Spans:
    """R spans of a pass. Logits lie span after span, depth + 1 rows each, N in all. Make it with `Spans.of`."""

    slot_ids: tuple[int, ...]
    depth: tuple[int, ...]  # draft tokens of each span, an upper bound of what the device holds
    slots: Tensor  # [R] int64
    drafted: Tensor  # [R] int64, depth on the device
    row_span: Tensor  # [N] int64
    row_depth: Tensor  # [N] int64, place of the row in its span
    first_row: Tensor  # [R] int64

    @classmethod
    def of(cls, slot_ids: Sequence[int], depth: Sequence[int], device: torch.device | str) -> Spans:
        """One host-to-device copy, asynchronous."""
        spans = len(slot_ids)
        first: list[int] = []
        row_span: list[int] = []
        row_depth: list[int] = []
        for span, drafts in enumerate(depth):
            first.append(len(row_span))
            row_span += [span] * (drafts + 1)
            row_depth += range(drafts + 1)
        packed = on_device([*slot_ids, *depth, *first, *row_span, *row_depth], torch.device(device))
        rows = len(row_span)
        slots, drafted, first_row, of_row, place = torch.split(packed, [spans, spans, spans, rows, rows])
        return cls(tuple(slot_ids), tuple(depth), slots, drafted, of_row, place, first_row)

    @property
    def widest(self) -> int:
        """Most drafts of any span."""
        return max(self.depth, default=0)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What R spans came to; device tensors. W = most drafts of any span + 1."""

    tokens: Tensor  # [R, W] int64; the first `counts` of a row are emitted
    counts: Tensor  # [R] int64, 0 for a dead slot or an error
    accepted: Tensor  # [R] int64, draft tokens that stand and are emitted
    drafted: Tensor  # [R] int64, draft tokens that were judged
    finish: Tensor  # [R] int64, a Finish
    stop_token: Tensor  # [R] int64, the id that ended it, or -1
    logprobs: Logprobs | None = None  # [R, W]; rows of requests that asked for none are 0
    whole: Tensor | None = None  # what `packed` gives, where it was made so; its tokens may have more columns

    def packed(self) -> Tensor:
        """int64 [R, W + 5] for one copy to the host: counts, accepted, drafted, finish, stop_token, tokens."""
        if self.whole is not None:
            return self.whole
        columns = (self.counts, self.accepted, self.drafted, self.finish, self.stop_token)
        return torch.cat([torch.stack(columns, dim=1), self.tokens], dim=1)


def accepted_prefix(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """How many drafts stand, [R] int64. p, q [R, L]: probability of each draft under verifier and drafter; u [R, L]
    uniforms.
    """
    return leading(u * q < p)


def leading(stands: Tensor) -> Tensor:
    """Length of the leading run of True in bool [R, L], as int64 [R]."""
    return stands.long().cumprod(-1).sum(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left of p once q has had its share, max(p - q, 0), not normalised. [R, V]"""
    return (p - q).clamp_min_(0)


def judge(
    logits: Tensor,
    spans: Spans,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
    draft_q: Tensor | None = None,
    point_mass: Sequence[bool] | None = None,
    *,
    mask: Tensor | None = None,
    context: int | None = None,
) -> Verdicts:
    """Judge every span, and write the outcome: tokens and lengths grow, state.alive falls where a request ends.

    logits fp32 [N, >= vocab]; tokens [S, T], lengths [S], drafts [S, Lmax], draft_lens [S] int64; draft_q fp32 [S,
    Lmax, >= vocab], the distribution each draft was drawn from, unless point_mass says for a span that its drafts were
    not drawn at all (n-gram); mask and context as in `transform`. Drafts have a column for each that any span has,
    tokens one for each that any request may have.
    """
    case = open_case(logits, spans, state, tokens, lengths, drafts, draft_lens, draft_q, point_mass, mask, context)
    if state.kernels == "triton":
        from verifypd.sampling import triton

        verdicts = _unpacked(triton.judge(case, tokens, lengths, drafts, draft_lens), spans.widest + 1)
    elif state.kernels == "native":
        from verifypd.sampling import native

        own, top = _own_choice(case)
        outcome = _outcome(case, own, top) if case.needs.rejection or case.needs.synthetic else None
        packed = native.verdicts(case, own, top, outcome, tokens, lengths, drafts, draft_lens)
        verdicts = _unpacked(packed, spans.widest + 1)
    else:
        verdicts = _finish(case, drafts, *_outcome(case, *_own_choice(case)))
        _commit(case, verdicts, tokens, lengths)
    return _with_logprobs(case, verdicts) if case.needs.logprobs else verdicts


def _unpacked(packed: Tensor, width: int) -> Verdicts:
    """What `Verdicts.packed` gives; its tokens may have more columns than `width`."""
    counts, accepted, drafted, finish, stop_token = packed[:, :5].unbind(1)
    return Verdicts(packed[:, 5 : 5 + width], counts, accepted, drafted, finish, stop_token, whole=packed)


class Outcome(NamedTuple):
    """What the rows of each span come to; [R]."""

    accepted: Tensor  # int64, drafts that stand
    following: Tensor  # int64, the token after them
    hopeless: Tensor  # bool, whether there is none to take


def _outcome(case: Case, own: Tensor, top: Tensor) -> Outcome:
    noise = _noise(case)
    accepted = _accepted(case, own, top, noise)
    return Outcome(accepted, *_following(case, own, top, noise, accepted))


@dataclass(frozen=True, slots=True)
class Case:
    """Everything the steps of a verdict look at."""

    logits: Tensor  # [N, >= vocab] raw
    x: Tensor  # [N, vocab] transformed; raw where every span is synthetic
    spans: Spans
    rows: Rows
    needs: Needs  # of the N rows
    span_needs: Needs  # of the R spans
    state: SamplingState
    length: Tensor  # [R] confirmed tokens
    drafted: Tensor  # [R] drafts on the device
    row_draft: Tensor  # [N] the draft that the row decides about; meaningless after the last
    draft_q: Tensor | None  # None: no span has one
    drawn: Tensor | None  # [R] bool, the span's drafts were drawn from draft_q; None: all were


def open_case(
    logits: Tensor,
    spans: Spans,
    state: SamplingState,
    tokens: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    draft_lens: Tensor,
    draft_q: Tensor | None,
    point_mass: Sequence[bool] | None,
    mask: Tensor | None,
    context: int | None,
) -> Case:
    """Transform the logits and gather what every step needs."""
    needs, span_needs = state.needs(spans.slot_ids, spans.depth), state.needs(spans.slot_ids)
    length = lengths[spans.slots]
    rows = Rows(spans.slots[spans.row_span], spans.row_depth, length[spans.row_span])
    x = logits
    if needs.synthetic.count < needs.rows:
        x = transform(logits, rows, state, tokens, drafts, needs, mask=mask, context=context)
    if spans.widest:
        row_draft = drafts[rows.slots, rows.depths.clamp_max(drafts.shape[1] - 1)].clamp_(0, state.vocab - 1)
    else:
        row_draft = rows.slots  # not looked at
    point = point_mass if point_mass is not None else (draft_q is None,) * len(spans.slot_ids)
    if all(drafted == 0 or given for drafted, given in zip(spans.depth, point, strict=True)):
        draft_q = None
    elif draft_q is None and needs.tried:
        raise ValueError("draft_q is needed for drafts that were drawn from a distribution")
    drawn = None
    if draft_q is not None and any(point):
        drawn = on_device([not given for given in point], logits.device).bool()
    drafted = torch.minimum(draft_lens[spans.slots], spans.drafted)
    return Case(logits, x, spans, rows, needs, span_needs, state, length, drafted, row_draft, draft_q, drawn)


def _own_choice(case: Case) -> tuple[Tensor, Tensor]:
    """The token [N] that the verifier itself takes in greedy and coupled rows, and its score [N]."""
    rows, needs = case.rows, case.needs
    if needs.greedy.count == needs.rows:
        top, own = best(case.x)
        return own, top
    if needs.coupled.count == needs.rows:
        top, own = best_with_noise(case.x, rows, case.state)
        return own, top
    own = torch.zeros_like(rows.slots)
    top = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
    if needs.greedy:
        score, token = best(needs.greedy.of(case.x))
        needs.greedy.put(own, token)
        needs.greedy.put(top, score)
    if needs.coupled:
        score, token = best_with_noise(needs.coupled.of(case.x), rows.take(needs.coupled), case.state)
        needs.coupled.put(own, token)
        needs.coupled.put(top, score)
    return own, top


def _noise(case: Case) -> Tensor:
    """fp32 [2, N, 4]: for accepting and for drawing what follows. Empty without rejection spans."""
    if not case.needs.rejection:
        return torch.empty(2, 0, 4)
    seeds, choices, indices = noise_keys(case.rows.slots, case.rows.positions, case.state)
    roles = torch.arange(int(Role.ACCEPT), int(Role.RESIDUAL) + 1, device=seeds.device)
    return uniforms(seeds, choices, indices, roles[:, None])


def _accepted(case: Case, own: Tensor, top: Tensor, noise: Tensor) -> Tensor:
    """How many drafts of each span stand, [R]."""
    spans, needs = case.spans, case.needs
    if spans.widest == 0:
        return torch.zeros_like(spans.slots)
    stands = (own == case.row_draft) & (top > -torch.inf)  # [N]; right for greedy and coupled rows
    if needs.tried:
        x, draft = needs.tried.of(case.x), needs.tried.of(case.row_draft)
        p = (x.gather(1, draft[:, None]).squeeze(1) - x.logsumexp(-1)).exp()  # NaN in a hopeless row: falls
        needs.tried.put(stands, needs.tried.of(noise[0, :, 0]) * _draft_probability(case, draft) < p)
    if needs.synthetic:
        rows = case.rows.take(needs.synthetic)
        u = uniform(*noise_keys(rows.slots, rows.positions, case.state), Role.SYNTHETIC)
        needs.synthetic.put(stands, u < case.state.alpha[rows.slots])
    place = torch.arange(spans.widest, device=own.device)
    row = spans.first_row[:, None] + torch.minimum(place, spans.drafted[:, None])  # [R, W - 1]
    return leading(stands[row] & (place < case.drafted[:, None]))


def _draft_probability(case: Case, draft: Tensor) -> Tensor:
    """q of the draft [M] that each tried row decides about."""
    if case.draft_q is None:
        return torch.ones((), device=draft.device)
    rows = case.rows.take(case.needs.tried)
    q = case.draft_q[rows.slots, rows.depths, draft].float()
    if case.drawn is None:
        return q
    return torch.where(case.drawn[case.needs.tried.of(case.spans.row_span)], q, 1.0)


def _following(case: Case, own: Tensor, top: Tensor, noise: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The token [R] after the accepted drafts, and whether [R] there is none to take."""
    last = case.spans.first_row + accepted  # [R]
    following, hopeless = own.index_select(0, last), top.index_select(0, last) == -torch.inf
    if case.span_needs.rejection:
        rejection = case.span_needs.rejection
        x = case.x.index_select(0, rejection.of(last))
        score, likeliest = best(x)
        weights = _leftover(case, x.softmax(-1), rejection, accepted, last)
        token = draw(weights, noise[1].index_select(0, rejection.of(last))[:, :2])
        # Nothing is left when p and q are the same up to rounding: take the likeliest token.
        some = weights.gather(1, token[:, None]).squeeze(1) > 0
        rejection.put(following, torch.where(some, token, likeliest))
        rejection.put(hopeless, score == -torch.inf)
    if case.span_needs.synthetic:
        synthetic = case.span_needs.synthetic
        raw = clean(case.logits.index_select(0, synthetic.of(last)), case.state.vocab)
        synthetic.put(following, best(raw)[1])
    return following, hopeless


def _leftover(case: Case, p: Tensor, spans: Subset, accepted: Tensor, last: Tensor) -> Tensor:
    """Weights [M, V] of the token after the accepted drafts: the residual where a draft fell, else p itself."""
    if case.spans.widest == 0:
        return p
    fell = spans.of(accepted) < spans.of(case.drafted)  # [M]
    drawn = fell if case.drawn is None else fell & spans.of(case.drawn)
    if case.draft_q is not None:
        depth = spans.of(accepted).clamp_max(case.draft_q.shape[1] - 1)
        q = case.draft_q[spans.of(case.spans.slots), depth][:, : p.shape[1]].float()
        p = residual(p, q.masked_fill(~drawn[:, None], 0.0))
        if case.drawn is None:
            return p
    given = fell if case.draft_q is None else fell & ~drawn
    draft = case.row_draft[spans.of(last)][:, None]
    return p.scatter(1, draft, p.gather(1, draft).masked_fill(given[:, None], 0.0))


def _finish(case: Case, drafts: Tensor, accepted: Tensor, following: Tensor, hopeless: Tensor) -> Verdicts:
    """Cut what is emitted at the first stop id and at the greatest length."""
    spans, state, length = case.spans, case.state, case.length
    width = spans.widest + 1
    place = torch.arange(width, device=following.device)
    emitted = torch.cat([drafts[spans.slots, : spans.widest], following[:, None]], dim=1)
    emitted = torch.where(place == accepted[:, None], following[:, None], emitted)  # [R, W]
    stop_at = torch.full_like(accepted, width)
    if case.needs.stop_width:
        stop_ids = state.stop_ids[spans.slots, : case.needs.stop_width]  # [R, K]
        hit = (emitted[:, :, None] == stop_ids[:, None]).any(-1) & (
            place + hopeless[:, None].long() <= accepted[:, None]
        )
        stop_at = torch.where(hit, place, width).amin(-1)
    room = (state.max_len[spans.slots] - length).clamp_min(0)
    limit = torch.minimum(stop_at + 1, room)
    error = hopeless & (limit > accepted)  # the missing token is one that would have been emitted
    counts = torch.minimum(accepted + 1, limit)
    finish = torch.where(length + counts >= state.max_len[spans.slots], int(Finish.LENGTH), int(Finish.RUNNING))
    stopped = stop_at < counts
    finish = torch.where(stopped, int(Finish.STOP), finish)
    alive = state.alive[spans.slots]
    finish = torch.where(error, int(Finish.ERROR), finish) * alive
    counts = counts * (alive & ~error)
    stop_token = emitted.gather(1, stop_at.clamp_max(width - 1)[:, None]).squeeze(1)
    return Verdicts(
        tokens=emitted,
        counts=counts,
        accepted=torch.minimum(accepted, counts),
        drafted=case.drafted * alive,
        finish=finish,
        stop_token=torch.where(stopped & alive & ~error, stop_token, -1),
    )


def _commit(case: Case, verdicts: Verdicts, tokens: Tensor, lengths: Tensor) -> None:
    """Write emitted tokens, lengths and life. Places past the count rewrite the last confirmed token with itself."""
    slots, length = case.spans.slots, case.length
    place = torch.arange(verdicts.tokens.shape[1], device=slots.device)
    emitted = place < verdicts.counts[:, None]
    before = (length - 1).clamp_min(0)
    column = torch.where(emitted, length[:, None] + place, before[:, None])
    tokens[slots[:, None], column] = torch.where(emitted, verdicts.tokens, tokens[slots, before][:, None])
    lengths[slots] = length + verdicts.counts
    case.state.alive[slots] = case.state.alive[slots] & (verdicts.finish == int(Finish.RUNNING))


def _with_logprobs(case: Case, verdicts: Verdicts) -> Verdicts:
    some, width = case.needs.logprobs, verdicts.tokens.shape[1]
    index = some.of(case.spans.row_span) * width + some.of(case.spans.row_depth)
    chosen = verdicts.tokens.flatten()[index].clamp_(0, case.state.vocab - 1)
    raw = clean(some.of(case.logits), case.state.vocab)
    found = token_logprobs(raw, chosen, case.needs.top_logprobs)
    return replace(verdicts, logprobs=padded(found, index, (len(case.spans.slot_ids), width)))
