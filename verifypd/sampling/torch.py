"""Cuts and verdicts in torch, for every device: the reference. Knows nothing of models or schedules."""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.sampling.base import Direct
from verifypd.sampling.case import Case, Finish, Outcome, Verdicts
from verifypd.sampling.cuts import cut_
from verifypd.sampling.draws import best, best_with_noise, draw, noise_keys
from verifypd.sampling.philox import Role, uniform, uniforms
from verifypd.sampling.rows import Rows, clean
from verifypd.sampling.state import Needs, SamplingState, Subset


class TorchSampling:
    """See SamplingKernels."""

    name = "torch"
    direct: Direct | None = None

    def cut_(self, x: Tensor, rows: Rows, state: SamplingState, needs: Needs, scale: Tensor | None) -> None:
        """See SamplingKernels.cut_."""
        cut_(x, rows, state, needs, scale)

    def judge(self, case: Case, tokens: Tensor, lengths: Tensor, drafts: Tensor, draft_lens: Tensor) -> Verdicts:
        """See SamplingKernels.judge."""
        verdicts = _finish(case, drafts, *outcome(case, *own_choice(case)))
        _commit(case, verdicts, tokens, lengths)
        return verdicts


def leading(stands: Tensor) -> Tensor:
    """Length of the leading run of True in bool [R, L], as int64 [R]."""
    return stands.long().cumprod(-1).sum(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left of p once q has had its share, max(p - q, 0), not normalised. [R, V]"""
    return (p - q).clamp_min_(0)


def outcome(case: Case, own: Tensor, top: Tensor) -> Outcome:
    """What the rows come to, given the verifier's own choices."""
    noise = _noise(case)
    accepted = _accepted(case, own, top, noise)
    return Outcome(accepted, *_following(case, own, top, noise, accepted))


def own_choice(case: Case) -> tuple[Tensor, Tensor]:
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
        p = x.softmax(-1).gather(1, draft[:, None]).squeeze(1)  # NaN in a hopeless row: falls
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
    counts = torch.where(error, accepted, counts) * alive  # drafts before the missing token stand
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
