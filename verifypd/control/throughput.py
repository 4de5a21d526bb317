"""The `throughput` controller: drafts what pays by the cost model and the survival curves, nothing where nothing pays.

Sees confirmed lengths, load, counts of accepted tokens and times; never a drawn draft token, so that no choice can bias
what is written. No torch, no clock, no logging.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifypd.control.allocation import Allocation, Load, allocations, joined, reach
from verifypd.control.controller import allowed
from verifypd.control.cost import CostModel
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.probing import Prober
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.control.survival import Kind, Survival, kind_of
from verifypd.control.temperature import TemperatureSearch

SLACK = 0.04  # tokens a second given up for shorter drafts
FEW = 0.1  # part of the requests that may do worse than without drafts
FAIR = 0.5  # how much of everyone's gain the slowest of the others may lose
AMENDS = 0.25  # of what others' drafts cost a request, what bringing its draft up to date may take
MISS_RATE = 0.05  # of the running means of forecast errors
FORGET = 1.0 - 1.0 / 64.0  # what is left of the evidence for each draft that is probed: it was gathered earlier
PRESSED = 2  # longest draft while prompts are late: what a loop takes of a step they do not get
LOOK, SELDOM = 8, 64  # steps after which the choice is weighed anew while nothing is drafted: twice as many each time
# nothing has changed, times the handfuls of requests, since a look takes as much longer; up to so many
HANDFUL = 4  # requests among which one that is new may change the choice at once
SPARSE = 4  # steps without drafts and prompts are alike: one of so many is learnt from
SETTLED = 0.025  # standard error of the acceptance that is taken for none
SOON, RELAPSE, RELAPSES = 32, 0.02, 4  # drafting that is given up within so many steps was begun too lightly: each time
# in a row adds so much to the gain that is asked for, so many times at most
PARDON = 1.0 - 1.0 / 512.0  # what is left of that after a step without drafts
SURE = 1.5  # standard errors of the acceptance that a foretold gain must exceed before drafting begins


class ThroughputController:
    """Drafts what pays: most tokens a second by the cost model and the survival curves; nothing where nothing pays.

    Speculation is entered only when the foretold gain exceeds a margin, and left when it falls below a part of it. The
    margin grows with the errors the cost model and the survival curves have made lately. While nothing is drafted, a
    small share of the time (`probe_share`) goes to drafts of one token, so that a change is noticed.
    """

    name = "throughput"

    def __init__(
        self,
        cost: CostModel | None = None,
        max_draft: int = 8,
        *,
        probe_share: float = 0.005,
        margin: float = 0.01,
        search_temperature: bool = False,
    ) -> None:
        self.cost = cost or CostModel()
        self.max_draft = max_draft
        self.survival = Survival(max_draft)
        self.search = TemperatureSearch() if search_temperature else None
        self.prober = Prober(self.cost, max_draft, probe_share)
        self.base_margin = margin
        self.overlap = False  # whether drafting runs beside the verifier
        self.speculating = True
        self.gain = 1.0  # foretold: tokens a second over those of plain decoding
        self.chosen: Allocation | None = None  # of the last step
        self.stretch = 1.0  # how much longer its drafts make a step
        self._longest = 0  # of the model's drafts, when there last were any
        self._drafted = 0  # longest draft of the last step that might have drafted
        self._missed = {False: 0.0, True: 0.0}  # measured / foretold − 1 of steps without and with drafts
        self._scatter = 0.0  # mean absolute size of it
        self._stint = 0  # steps since drafting began
        self._relapses = 0.0  # how often it was soon given up, lately
        self._idle = 0  # steps since the choice was looked at while not drafting
        self._patience = LOOK  # of those, how many may pass
        self._alike = 0  # steps without drafts and prompts
        self._news = False  # whether a draft's verdict, or somebody new among few, came since
        self._present = 0  # requests at the last plan, less those who have left since
        self._heard: dict[int, int] = {}  # order → output tokens it knows of; none are told of while it rests
        self._mean_output = 64.0

    @property
    def curious(self) -> bool:
        """Drafting, or about to look again whether to, or with enough saved up for a probe."""
        return self.speculating or self._look_due or self.prober.ready

    @property
    def drafting(self) -> bool:
        """While it believes that drafts pay."""
        return self.speculating

    @property
    def margin(self) -> float:
        """Gain that must be foretold before drafting is believed to pay: grows with the errors made lately."""
        doubt = 2.0 * math.sqrt(MISS_RATE / 2.0) * self._scatter  # two standard errors of a running mean
        return self.base_margin + doubt + 0.1 * min(0.1, self.survival.calibration_error)

    @property
    def _unsure(self) -> float:
        """Part of a foretold gain that may be luck: the acceptance behind it was seen so and so often."""
        return 0.75 * SURE * max(0.0, self.survival.doubt - SETTLED)

    # -- the choice ---------------------------------------------------------------------------------------------------

    def meet(self, views: Sequence[RequestView]) -> None:
        """Someone new, of whom the best may be hoped, is reason to look at once; among many it can wait."""
        self._present = len(views)
        for view in views:
            if view.order not in self._heard:
                self._news = self._news or len(views) <= HANDFUL
                self._heard[view.order] = view.emitted
            elif self.speculating:
                self._heard[view.order] = view.emitted

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot) -> dict[int, int]:
        """Draft lengths that make the most of this step."""
        self.prober.meet(snapshot)
        self.meet(views)
        if not self.curious:
            return {}
        if not self.speculating:
            self._catch_up(views, snapshot)
        candidates = [(view, cap) for view in views if (cap := allowed(view, self._most(snapshot)))]
        if not candidates:
            return {}
        if not self.speculating and not self._look_due:
            return self.prober.probe(candidates, self._load(views, snapshot, []), snapshot)
        self._patience = LOOK if self._news or self.speculating else min(SELDOM, 2 * self._patience)
        self._idle, self._news = 0, False
        joining = [pair for pair in candidates if self._worth_catching_up(pair[0], snapshot)]
        if not joining:  # nobody is worth it: that says nothing about those who come
            return {} if self.speculating else self.prober.probe(candidates, self._load(views, snapshot, []), snapshot)
        curves = self._curves(joining, snapshot)
        load = self._load(views, snapshot, [view for view, _ in joining])
        everyone, copied = curves, _looked_up(joining)
        if not self.speculating:  # to begin, it must pay for those too who are about to decode
            coming = [view.length_bound for view in snapshot.requests if view.prefill_left]
            everyone, copied, load = joined(curves, copied, load, coming, snapshot.routine_lag)
        options = allocations(everyone, load, self.cost, self.overlap, copied)
        best = self._choose(options, curves, joining, len(snapshot.requests))
        if not self.speculating:
            self.prober.appraise(candidates, load, options[0], self.overlap)
            self.chosen = options[0]
            return self.prober.probe(candidates, load, snapshot)
        self.chosen = best
        lengths = {
            view.slot: length
            for (view, _), curve in zip(joining, curves, strict=True)
            if (length := _length(view, curve, best))
        }
        self._drafted = max(lengths.values(), default=0)
        return lengths

    def _most(self, snapshot: Snapshot) -> int:
        """The longest draft there may be now."""
        return min(self.max_draft, PRESSED) if snapshot.pressed else self.max_draft

    def predict(self, views: Sequence[RequestView], snapshot: Snapshot, overlap: bool = False) -> list[Allocation]:
        """What each longest draft would come to for these requests; the first drafts nothing. Changes nothing."""
        candidates = [(view, cap) for view in views if (cap := allowed(view, self._most(snapshot)))]
        load = self._load(views, snapshot, [view for view, _ in candidates])
        return allocations(self._curves(candidates, snapshot), load, self.cost, overlap, _looked_up(candidates))

    def corrected(self, best: Allocation, plain: Allocation) -> float:
        """The gain of one over the other, with the errors lately made about steps with and without drafts taken out."""
        gain = best.rate / plain.rate if plain.rate else 1.0
        return gain * (1.0 + self._missed[False]) / (1.0 + self._missed[True])

    @property
    def _look_due(self) -> bool:
        """While not drafting: whether to weigh it anew, on news or now and then."""
        return self._news or self._idle >= min(SELDOM, self._patience * max(1, self._present // HANDFUL))

    def _choose(
        self,
        options: list[Allocation],
        curves: Sequence[Sequence[float]],
        joining: list[tuple[RequestView, int]],
        others: int,
    ) -> Allocation:
        """The best option, the last longest draft where it is as good, or none at all."""
        plain = options[0]
        ranked = sorted(options[1:], key=lambda option: -option.rate)
        # the optimum is flat: of those about as good, the shortest has the shortest steps, which others wait for
        slack = SLACK * (1.0 - 1.0 / max(1, others))
        close = [option for option in ranked if option.rate >= ranked[0].rate * (1.0 - slack)]
        close.sort(key=lambda option: option.longest)
        best = next((o for o in (*close, *ranked[len(close) :]) if not self._hurts(o, plain, curves, joining)), None)
        if best is None:
            self.gain, self.stretch = 1.0, 1.0
            self._settle(False)
            return plain
        self.gain = self.corrected(best, plain)
        if self.speculating:
            margin = self.margin * 0.3 - self._unsure
        else:
            margin = self.margin + self._unsure + RELAPSE * self._relapses
        self._settle(self.gain > 1.0 + margin)
        self._longest = best.longest
        self.stretch = best.seconds / plain.seconds if self.speculating else 1.0
        return best if self.speculating else plain

    def _settle(self, speculating: bool) -> None:
        """Draft from now on or not, and remember when it is given up too soon."""
        if self.speculating and not speculating:
            self._relapses = min(RELAPSES, self._relapses + 1.0) if self._stint < SOON else 0.0
        if speculating and not self.speculating:
            self._stint = 0
            self.prober.bear_fruit()
        self._stint += speculating
        self.speculating = speculating

    def _hurts(
        self,
        option: Allocation,
        plain: Allocation,
        curves: Sequence[Sequence[float]],
        joining: list[tuple[RequestView, int]],
    ) -> bool:
        """Whether more than a few requests would miss a target that they meet without drafts, or the slowest would lose
        more than what all gain is worth: a mean that is bought from the tail shows in p95."""
        missed, progress = 0, []  # tokens a request makes in the step
        low, high = plain.seconds * 1e3, option.seconds * 1e3
        for (view, _), curve in zip(joining, curves, strict=True):
            tokens = 1.0 + sum(curve[: _length(view, curve, option)])
            progress.append(tokens)
            missed += low <= view.slo_tpot < high / tokens
        if missed > FEW * len(joining):
            return True
        slowest = sorted(progress)[int(FEW * len(progress))]
        loss = (option.seconds - option.aside) / (plain.seconds - plain.aside) / slowest - 1.0
        gain = option.rate / plain.rate - 1.0
        if self.speculating:  # to stop again needs more than to begin: both are guesses
            return loss - self._unsure > 3.0 * FAIR * gain
        return loss > FAIR * gain

    def _curves(self, candidates: Sequence[tuple[RequestView, int]], snapshot: Snapshot) -> list[list[float]]:
        """Survivals as far as each may draft; requests behind their target weigh more, the mean weight is 1."""
        weights = [_urgency(view) for view, _ in candidates]
        total, even = sum(weights), len(weights)
        survival, depth = self.survival, self.max_draft
        curves = []
        for (view, cap), weight in zip(candidates, weights, strict=True):
            curve = survival.curve(view.order, self._kind(view, snapshot.drafter))
            if cap < depth:
                curve = curve[:cap]
            if total != even:
                factor = weight * even / total
                curve = [value * factor for value in curve]
            curves.append(curve)
        return curves

    def _kind(self, view: RequestView, drafter: str | None) -> Kind:
        return kind_of(view.greedy, view.coupled, view.temperature, view.proposer or drafter)

    def _load(self, views: Sequence[RequestView], snapshot: Snapshot, drafting: Sequence[RequestView]) -> Load:
        """What the step carries anyway, and what drafting for `drafting` would touch."""
        context = float(sum([view.length_bound for view in views]))
        requests, rows = len(views), float(len(views))
        chunk_rows = chunk_context = riding = 0.0
        if len(snapshot.requests) > requests:
            inside = {view.slot for view in views}
            room = snapshot.batch_size - requests
            left = snapshot.prefill_chunk
            for view in snapshot.requests:
                if view.prefill_left:
                    take = min(left, view.prefill_left)
                    if take:
                        left -= take
                        chunk_rows += take
                        riding += view.chunk_start + take
                        chunk_context += take * (view.chunk_start + take)
                elif room > 0 and view.slot not in inside and not self.overlap:
                    room -= 1
                    requests += 1
                    rows += 1 + view.pending
                    context += view.length_bound
        draft_context = float(sum([view.length_bound for view in drafting if view.proposer is None]))
        draft_rows = 0.0
        if snapshot.drafter_has_cache:
            routine = snapshot.routine_lag
            for view in drafting:
                if view.proposer is None:
                    debt = max(0, view.draft_lag - routine)
                    draft_rows += max(1, min(view.draft_lag, routine)) + debt / self._horizon(view)
        aside = 0.0
        if chunk_rows:
            alone = self.cost.verify_seconds(rows, context)
            rows, context = rows + chunk_rows, context + riding
            aside = self.cost.verify_seconds(rows, context, chunk_context, mixed=True) - alone
        return Load(requests, rows, context, chunk_context, chunk_rows > 0, draft_context, draft_rows, aside)

    def _horizon(self, view: RequestView) -> float:
        """Steps a request is expected to last: as others did, or as long again as it has."""
        left = max(self._mean_output, view.emitted)
        return max(1.0, min(left, view.room) / 2.0)

    def _worth_catching_up(self, view: RequestView, snapshot: Snapshot) -> bool:
        """Whether what drafts will save pays for bringing the draft's cache up to date.

        Or whether others' drafts would cost it more than its debt costs them: who is left out lasts longer steps and
        gets one token from each, and would be better off without any speculation.
        """
        lag = view.draft_lag - snapshot.routine_lag
        if lag <= 16 or not snapshot.drafter_has_cache or self.chosen is None:
            return True
        c, rate = self.cost.coefficients, self.chosen.rate
        horizon = self._horizon(view)
        longer = self.chosen.seconds * (1.0 - 1.0 / max(1.0, self.stretch))  # of each step, by what others draft
        if self.speculating and c.draft_row * lag < AMENDS * longer * horizon:
            return True
        price = rate * c.draft_row * lag  # tokens
        longest = max(1, self._longest)
        curve = self.survival.curve(view.order, self._kind(view, snapshot.drafter))[:longest]
        value = sum(curve) - rate * longest * c.draft_context * view.context
        return value * horizon > price

    # -- learning -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, float]:
        """What it foretells, and how far its forecasts have been off; of the step it chose, tokens and ms."""
        chosen = self.chosen
        step = {} if chosen is None else {"step_tokens": chosen.tokens, "step_ms": 1e3 * chosen.seconds}
        return step | {
            "draft_length": self._drafted if self.speculating else 0,
            "gain": self.gain,
            "margin": self.margin,
            "stretch": self.stretch,
            "acceptance": self.survival.mean(),
            "calibration_error": self.survival.calibration_error,
            "cost_error": self.cost.error,
            "probes": self.prober.probes,
            "probe_worth": self.prober.worth,
        }

    def temperature(self, view: RequestView) -> float:
        """1, unless the search is on and has found or is trying something else for this kind of request."""
        if self.search is None or view.greedy:
            return 1.0
        return self.search.choose(kind_of(False, view.coupled, view.temperature, None), view.order, view.length_floor)

    def _catch_up(self, views: Sequence[RequestView], snapshot: Snapshot) -> None:
        """Learn what came of a rest: evidence of drafts has grown old by the tokens that went on without them, and how
        look-ups would have fared the texts tell."""
        for view in views:
            if (passed := view.emitted - self._heard[view.order]) > 0:
                self.survival.rest(view.order, passed)
                self._heard[view.order] = view.emitted
            stood, trials = view.overheard
            if trials:
                kind = kind_of(view.greedy, view.coupled, view.temperature, snapshot.copier)
                self.survival.overhear(view.order, kind, stood, trials)

    def observe(self, seen: Observation) -> None:
        """Learn how a draft fared."""
        if not self.speculating and seen.drafted:
            if seen.accepted == seen.drafted:
                self.prober.stood()
            self.survival.fade(FORGET, kind_of(seen.greedy, seen.coupled, seen.temperature, seen.drafter))
        self.survival.observe(seen)
        self._heard[seen.order] = self._heard.get(seen.order, 0) + seen.emitted
        if seen.drafted:
            self._news = True
            if self.search is not None and not seen.greedy:
                self.search.observe(seen)

    def observe_step(self, timing: StepTiming) -> None:
        """Learn what a step cost, and how far the forecast was off."""
        if not self.speculating:
            self._idle += 1
            self._relapses *= PARDON
            self.prober.save_up(timing.step_seconds or timing.device_seconds)
        drafted = timing.draft_seconds > 0.0  # by look-up too, which takes no steps
        if not (self.speculating or drafted or timing.chunk_rows) and self.cost.known:
            self._alike += 1
            if self._alike % SPARSE:
                return
        expected = self.cost.step_seconds(timing) - self.cost.overhead
        if expected > 0.0 and timing.verify_rows and self.cost.known:
            miss = max(-0.3, min(0.3, timing.device_seconds / expected - 1.0))
            self._missed[drafted] += MISS_RATE * (miss - self._missed[drafted])
            self._missed[not drafted] *= 0.998  # what was learnt of the other kind grows old
            self._scatter += MISS_RATE * (abs(miss) - self._scatter)
        self.cost.observe(timing)

    def forget(self, order: int, emitted: int) -> None:
        """A request has left: its length tells how long others will last."""
        self.survival.forget(order)
        self._patience = LOOK  # fewer are left: what did not pay may pay now
        self._present = max(0, self._present - 1)
        self._heard.pop(order, None)
        if emitted:
            self._mean_output += 0.05 * (emitted - self._mean_output)


def _looked_up(candidates: Sequence[tuple[RequestView, int]]) -> list[bool]:
    """Whose drafts no model makes; empty where all are."""
    flags = [view.proposer is not None for view, _ in candidates]
    return flags if any(flags) else []


def _length(view: RequestView, curve: Sequence[float], chosen: Allocation) -> int:
    """What an allocation gives to a request."""
    return reach(curve, chosen.threshold, chosen.longest if view.proposer is None else len(curve))


def _urgency(view: RequestView) -> float:
    """1 for a request within its target; up to 2 for one whose last output lies further back."""
    late = view.since_output * 1e3
    return 1.0 if late <= view.slo_tpot else min(2.0, late / view.slo_tpot)
