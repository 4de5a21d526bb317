"""Sets draft lengths and the drafter's temperature. Sees confirmed lengths, load, counts of accepted tokens and times;

never a drawn draft token, so that no choice can bias what is written. No torch, no clock, no logging.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from verifypd.control.cost import CostModel
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.control.survival import Kind, Survival, kind_of
from verifypd.errors import ConfigError

TAU_LOW, TAU_HIGH, TAU_STEP = 0.6, 1.6, 0.1
MISS_RATE = 0.05  # of the running means of forecast errors
FORGET = 0.9  # what is left of the evidence about a kind, for each probe: it was gathered under another sky
LEAST = 0.02  # survival below which a position is not drafted even where its row is free
CAUGHT_UP = 2  # tokens a draft's cache lacks in steady state; more is a lag that costs something to make up


class Controller(Protocol):
    """Chooses how many tokens each request drafts next, and how hot its drafter draws."""

    name: str

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot) -> dict[int, int]:
        """slot → tokens to draft, for requests that would draft and verify together; missing: 0."""
        ...

    def temperature(self, view: RequestView) -> float:
        """τ: the drafter draws at τ times the request's temperature."""
        ...

    def observe(self, seen: Observation) -> None:
        """A verdict came in."""
        ...

    def observe_step(self, timing: StepTiming) -> None:
        """A step was measured."""
        ...

    def forget(self, order: int) -> None:
        """A request has left for good."""
        ...


def allowed(view: RequestView, length: int) -> int:
    """`length`, unless the request or its drafter allows less. One token is left for the correction or bonus."""
    return max(0, min(length, view.draft_limit, view.promise, view.max_length - view.length_floor - 1))


class FixedController:
    """Always asks for the same length."""

    name = "fixed"

    def __init__(self, length: int) -> None:
        self.length = length

    def draft_length(self, view: RequestView) -> int:
        """The length for one request."""
        return allowed(view, self.length)

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot) -> dict[int, int]:
        """The same for all, as far as each allows."""
        return {view.slot: length for view in views if (length := allowed(view, self.length))}

    def temperature(self, view: RequestView) -> float:
        """The request's own."""
        return 1.0

    def observe(self, seen: Observation) -> None:
        """Nothing to learn."""

    def observe_step(self, timing: StepTiming) -> None:
        """Nothing to learn."""

    def forget(self, order: int) -> None:
        """Nothing was kept."""


class ThresholdController:
    """The original's rules: one length for all, moved by one every ten observations, by fixed limits."""

    name = "threshold"
    SHORTEST, LONGEST, START = 2, 8, 4
    EVERY = 10  # observations (verified drafts) between two moves
    WINDOW = 100  # decode-lane steps the p95 is taken over
    QUEUE_HIGH, QUEUE_LOW = 10, 1  # requests in the verify queue
    P95_HIGH, P95_LOW = 50e-3, 45e-3  # s
    RATE_LOW, RATE_HIGH = 0.35, 0.65

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = min(self.LONGEST, longest)
        self.length = min(self.START, self.longest)
        self.tau = 1.0
        self.queue = 0
        self._steps: deque[float] = deque(maxlen=self.WINDOW)  # s, queue wait included
        self._observations = 0
        self._drafted = 0
        self._emitted = 0

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot) -> dict[int, int]:
        """The same for all, as far as each allows."""
        self.queue = sum(1 for view in snapshot.requests if view.pending)
        return {view.slot: length for view in views if (length := allowed(view, self.length))}

    def temperature(self, view: RequestView) -> float:
        """A tenth above the request's own under pressure."""
        return self.tau

    def observe(self, seen: Observation) -> None:
        """Count a verified draft; every tenth moves the length."""
        if not seen.drafted:
            return
        self._observations += 1
        self._drafted += seen.drafted
        self._emitted += seen.emitted
        if self._observations == self.EVERY:
            self._move()
            self._observations = self._drafted = self._emitted = 0

    def observe_step(self, timing: StepTiming) -> None:
        """Keep the latency of a decode-lane step."""
        if timing.draft_requests:
            self._steps.append(timing.decode_wait + timing.draft_seconds)

    def forget(self, order: int) -> None:
        """Nothing is kept by request."""

    @property
    def p95(self) -> float:
        """95th percentile of the last decode-lane steps, s."""
        steps = sorted(self._steps)
        return steps[math.ceil(0.95 * len(steps)) - 1] if steps else 0.0

    @property
    def rate(self) -> float:
        """Emitted over drafted since the last move: the correction token counts as accepted, as the original had it."""
        return min(1.0, self._emitted / self._drafted) if self._drafted else 0.0

    def _move(self) -> None:
        p95, rate = self.p95, self.rate
        pressed = self.queue > self.QUEUE_HIGH or p95 > self.P95_HIGH
        self.tau = 1.0 + TAU_STEP if pressed else 1.0
        if pressed or rate < self.RATE_LOW:
            self.length = max(min(self.SHORTEST, self.longest), self.length - 1)
        elif self.queue <= self.QUEUE_LOW and p95 < self.P95_LOW and rate > self.RATE_HIGH:
            self.length = min(self.longest, self.length + 1)


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries before anyone drafts."""

    requests: int  # decode spans, those that cannot draft included
    rows: float  # verifier rows: one a request, drafts already written, and chunks that ride along
    context: float  # Σ context, tokens
    chunk_context: float = 0.0  # Σ chunk × context of those chunks
    mixed: bool = False  # whether there are such chunks
    draft_context: float = 0.0  # Σ context of those that may draft
    draft_rows: float = 0.0  # tokens they catch up with, spread over the steps they are expected to last


@dataclass(frozen=True, slots=True)
class Allocation:
    """How much to draft in a step and what it comes to."""

    longest: int  # longest draft: what the loop costs
    threshold: float  # positions with a survival above it are drafted
    tokens: float  # expected, one a request included
    seconds: float
    draft_seconds: float
    rows: float  # drafted tokens

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def allocations(
    curves: Sequence[Sequence[float]], load: Load, cost: CostModel, overlap: bool = False
) -> list[Allocation]:
    """For each longest draft 0, 1, 2 … the best filling: most (requests + Σ survivals) a second.

    `curves` holds the survivals of each request, falling along its positions. A loop costs its longest draft, however
    few reach that far, so each length is searched by itself; for one length, positions are taken from the likeliest
    down while they pay for their row: survival > rate · row (Dinkelbach's iteration), and rows below the knee are free.
    `overlap`: drafting runs beside the verifier, on a device of its own, so that the longer of the two counts.
    """
    c = cost.coefficients
    fixed = cost.verify_seconds(1, load.context, load.chunk_context, load.mixed) - max(c.floor, c.row) + cost.overhead
    plain = fixed + max(c.floor, c.row * load.rows)
    found = [Allocation(0, 1.0, float(load.requests), plain, 0.0, 0.0)]
    deepest = max(map(len, curves), default=0)
    columns: list[list[float]] = []  # by position: survivals, negative and rising, so that bisect can count them
    sums: list[list[float]] = []
    for i in range(deepest):
        column = sorted([-curve[i] for curve in curves if len(curve) > i])
        columns.append(column)
        sums.append([0.0, *accumulate(column)])
    free = c.knee - load.rows  # rows that cost nothing more
    share = 1.0 / len(curves) if curves else 0.0
    rate = found[0].rate
    for longest in range(1, deepest + 1):
        best: Allocation | None = None
        for _ in range(6):
            threshold = rate * c.row
            count, gain = _above(columns, sums, longest, threshold)
            if count < free:
                threshold = _fill(columns, longest, math.ceil(free), threshold)
                count, gain = _above(columns, sums, longest, threshold)
            if not count:
                break
            part = bisect_left(columns[0], -threshold) * share  # of the candidates, how many draft at all
            draft = cost.draft_seconds(longest, load.draft_rows * part, load.draft_context * part)
            verify = fixed + max(c.floor, c.row * (load.rows + count))
            seconds = max(verify, draft) if overlap else verify + draft
            option = Allocation(longest, threshold, load.requests + gain, seconds, draft, count)
            if best is not None and option.rate <= best.rate * 1.0001:
                break
            best = option
            if option.rate <= rate * 1.0001:
                break
            rate = option.rate
        if best is not None:
            found.append(best)
    return found


def _above(
    columns: Sequence[Sequence[float]], sums: Sequence[Sequence[float]], longest: int, threshold: float
) -> tuple[int, float]:
    """How many of the first `longest` positions have a survival above the threshold, and the sum of those."""
    count, gain = 0, 0.0
    for i in range(longest):
        n = bisect_left(columns[i], -threshold)
        if not n:
            break  # survivals fall along the positions
        count += n
        gain -= sums[i][n]
    return count, gain


def _fill(columns: Sequence[Sequence[float]], longest: int, free: float, threshold: float) -> float:
    """The lowest threshold, up to the given one, that keeps the count within the free rows."""
    low, high = LEAST, max(LEAST, threshold)
    if sum(bisect_left(columns[i], -low) for i in range(longest)) <= free:
        return low
    for _ in range(16):
        middle = (low + high) / 2
        count = sum(bisect_left(columns[i], -middle) for i in range(longest))
        low, high = (middle, high) if count > free else (low, middle)
    return high


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
        protect: bool = True,
        search_temperature: bool = False,
    ) -> None:
        self.cost = cost or CostModel()
        self.max_draft = max_draft
        self.survival = Survival(max_draft)
        self.search = TemperatureSearch() if search_temperature else None
        self.probe_share = probe_share
        self.base_margin = margin
        self.protect = protect  # whether drafting may push a request over its target that plain decoding would meet
        self.overlap = False  # whether drafting runs beside the verifier
        self.speculating = True
        self.gain = 1.0  # foretold: tokens a second over those of plain decoding
        self.chosen: Allocation | None = None  # of the last step
        self.probes = 0
        self.probe_seconds = 0.0  # spent on probes, foretold
        self._price = 0.0  # of the last probe, for each request in it
        self._credit = 1.0  # s that may be spent on probes; at first enough for a few
        self._longest = 0
        self._fruitless = 0  # probes in a row that changed nothing
        self._missed = {False: 0.0, True: 0.0}  # measured / foretold − 1 of steps without and with drafts
        self._scatter = 0.0  # mean absolute size of it
        self._idle = 0  # steps since the choice was looked at while not drafting
        self._news = False  # whether a draft's verdict came in since
        self._outputs: dict[int, int] = {}  # order → tokens emitted
        self._mean_output = 64.0

    @property
    def margin(self) -> float:
        """Gain that must be foretold before drafting is believed to pay: grows with the errors made lately."""
        doubt = 2.0 * math.sqrt(MISS_RATE / 2.0) * self._scatter  # two standard errors of a running mean
        return self.base_margin + doubt + 0.1 * min(0.1, self.survival.calibration_error)

    # -- the choice ---------------------------------------------------------------------------------------------------

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot) -> dict[int, int]:
        """Draft lengths that make the most of this step."""
        candidates = [(view, cap) for view in views if (cap := allowed(view, self.max_draft))]
        if not candidates:
            return {}
        if not self.speculating and not self._look_again():
            return self._probe(candidates, self._load(views, snapshot, []), snapshot)
        joining = [pair for pair in candidates if self._worth_catching_up(pair[0], snapshot)]
        curves = self._curves(joining, snapshot)
        load = self._load(views, snapshot, [view for view, _ in joining])
        options = allocations(curves, load, self.cost, self.overlap)
        best = self._choose(options, curves, joining)
        if not self.speculating:
            self.chosen = options[0]
            return self._probe(candidates, load, snapshot)
        self.chosen = best
        return {
            view.slot: length
            for (view, _), curve in zip(joining, curves, strict=True)
            if (length := _reach(curve, best.threshold, best.longest))
        }

    def predict(self, views: Sequence[RequestView], snapshot: Snapshot, overlap: bool = False) -> list[Allocation]:
        """What each longest draft would come to for these requests; the first drafts nothing. Changes nothing."""
        candidates = [(view, cap) for view in views if (cap := allowed(view, self.max_draft))]
        load = self._load(views, snapshot, [view for view, _ in candidates])
        return allocations(self._curves(candidates, snapshot), load, self.cost, overlap)

    def corrected(self, best: Allocation, plain: Allocation) -> float:
        """The gain of one over the other, with the errors lately made about steps with and without drafts taken out."""
        gain = best.rate / plain.rate if plain.rate else 1.0
        return gain * (1.0 + self._missed[False]) / (1.0 + self._missed[True])

    def _look_again(self) -> bool:
        """While not drafting: whether to weigh it anew, after a probe's verdict or now and then."""
        self._idle += 1
        if self._news or self._idle >= 8:
            self._idle, self._news = 0, False
            return True
        return False

    def _choose(
        self, options: list[Allocation], curves: Sequence[Sequence[float]], joining: list[tuple[RequestView, int]]
    ) -> Allocation:
        """The best option, the last longest draft where it is as good, or none at all."""
        plain = options[0]
        ranked = sorted(options[1:], key=lambda option: -option.rate)
        while ranked and self.protect and self._hurts(ranked[0], plain, curves, joining):
            del ranked[0]
        if not ranked:
            self.gain, self.speculating = 1.0, False
            return plain
        best = next((o for o in ranked if o.longest == self._longest and o.rate > ranked[0].rate * 0.995), ranked[0])
        self.gain = self.corrected(best, plain)
        margin = self.margin * (0.3 if self.speculating else 1.0)
        entering = not self.speculating
        self.speculating = self.gain > 1.0 + margin
        if entering and self.speculating:
            self._fruitless = 0
        self._longest = best.longest
        return best if self.speculating else plain

    def _hurts(
        self,
        option: Allocation,
        plain: Allocation,
        curves: Sequence[Sequence[float]],
        joining: list[tuple[RequestView, int]],
    ) -> bool:
        """Whether more than a few requests would miss a target that they meet without drafts."""
        missed = 0
        low, high = plain.seconds * 1e3, option.seconds * 1e3
        for (view, _), curve in zip(joining, curves, strict=True):
            if low <= view.slo_tpot < high:
                reach = _reach(curve, option.threshold, option.longest)
                missed += high > view.slo_tpot * (1.0 + sum(curve[:reach]))
        return missed > 0.05 * len(joining)

    def _curves(self, candidates: Sequence[tuple[RequestView, int]], snapshot: Snapshot) -> list[list[float]]:
        """Survivals as far as each may draft; requests behind their target weigh more, the mean weight is 1."""
        weights = [_urgency(view) for view, _ in candidates]
        total, even = sum(weights), len(weights)
        survival, drafter, depth = self.survival, snapshot.drafter, self.max_draft
        curves = []
        for (view, cap), weight in zip(candidates, weights, strict=True):
            curve = survival.curve(view.order, kind_of(view.greedy, view.coupled, view.temperature, drafter))
            if cap < depth:
                curve = curve[:cap]
            if total != even:
                factor = weight * even / total
                curve = [value * factor for value in curve]
            curves.append(curve)
        return curves

    def _kind(self, view: RequestView, drafter: str | None) -> Kind:
        return kind_of(view.greedy, view.coupled, view.temperature, drafter)

    def _load(self, views: Sequence[RequestView], snapshot: Snapshot, drafting: Sequence[RequestView]) -> Load:
        """What the step carries anyway, and what drafting for `drafting` would touch."""
        context = float(sum([view.length_bound for view in views]))
        requests, rows = len(views), float(len(views))
        chunk_context = 0.0
        mixed = False
        if len(snapshot.requests) > requests:
            inside = {view.slot for view in views}
            room = snapshot.batch_size - requests
            left = snapshot.prefill_chunk
            for view in snapshot.requests:
                if view.prefill_left:
                    take = min(left, view.prefill_left)
                    if take:
                        left -= take
                        mixed = True
                        rows += take
                        context += view.chunk_start + take
                        chunk_context += take * (view.chunk_start + take)
                elif room > 0 and view.slot not in inside and not self.overlap:
                    room -= 1
                    requests += 1
                    rows += 1 + view.pending
                    context += view.length_bound
        draft_context = float(sum([view.length_bound for view in drafting]))
        draft_rows = 0.0
        if snapshot.drafter_has_cache:
            draft_rows = float(CAUGHT_UP * len(drafting))
            for view in drafting:
                if view.draft_lag > CAUGHT_UP:
                    draft_rows += (view.draft_lag - CAUGHT_UP) / self._horizon(view)
        return Load(requests, rows, context, chunk_context, mixed, draft_context, draft_rows)

    def _horizon(self, view: RequestView) -> float:
        """Steps a request is expected to last: as others did, or as long again as it has."""
        left = max(self._mean_output, self._outputs.get(view.order, 0))
        return max(1.0, min(left, view.room) / 2.0)

    def _worth_catching_up(self, view: RequestView, snapshot: Snapshot) -> bool:
        """Whether what drafts will save pays for bringing the draft's cache up to date."""
        lag = view.draft_lag - CAUGHT_UP
        if lag <= 16 or not snapshot.drafter_has_cache or self.chosen is None:
            return True
        c, rate = self.cost.coefficients, self.chosen.rate
        price = rate * c.draft_row * lag  # tokens
        longest = max(1, self._longest)
        curve = self.survival.curve(view.order, self._kind(view, snapshot.drafter))[:longest]
        value = sum(curve) - rate * longest * c.draft_context * view.context
        return value * self._horizon(view) > price

    # -- probing ------------------------------------------------------------------------------------------------------

    def _probe(self, candidates: list[tuple[RequestView, int]], load: Load, snapshot: Snapshot) -> dict[int, int]:
        """A draft of one token for a few, once enough time has been saved up for it."""
        c = self.cost.coefficients
        plain = self.cost.verify_seconds(load.rows, load.context, load.chunk_context, load.mixed) + self.cost.overhead
        cached = snapshot.drafter_has_cache
        lags = sorted(((view.draft_lag if cached else 0, view.slot) for view, _ in candidates), key=lambda p: p[0])
        price = c.draft_start + c.draft_step + c.draft_row * lags[0][0]
        share = self.probe_share * (1.0 if self._fruitless < 32 else 0.5)
        self._credit = min(self._credit + share * plain, max(4.0 * price, share * plain))
        free = c.knee - load.rows
        if free < 1:
            price += c.row
        if self._credit < price or not share:
            return {}
        slots = {lags[0][1]: 1}
        for lag, slot in lags[1:16]:
            more = c.draft_row * lag + (c.row if len(slots) >= free else 0.0)
            if price + more > self._credit or more > 0.1 * price:
                break
            price += more
            slots[slot] = 1
        self._credit -= price
        self.probes += 1
        self._fruitless += 1
        self.probe_seconds += price
        self._price = price / len(slots)
        return slots

    # -- learning -----------------------------------------------------------------------------------------------------

    def temperature(self, view: RequestView) -> float:
        """1, unless the search is on and has found or is trying something else for this kind of request."""
        if self.search is None or view.greedy:
            return 1.0
        return self.search.choose(kind_of(False, view.coupled, view.temperature, None), view.order, view.length_floor)

    def observe(self, seen: Observation) -> None:
        """Learn how a draft fared."""
        if not self.speculating and seen.drafted:
            # a probe that stands has earned its keep: the next may follow at once, and a change is soon believed
            self._credit += self._price if seen.accepted == seen.drafted else 0.0
            self.survival.fade(FORGET)
        self.survival.observe(seen)
        self._outputs[seen.order] = self._outputs.get(seen.order, 0) + seen.emitted
        if seen.drafted:
            self._news = True
            if self.search is not None and not seen.greedy:
                self.search.observe(seen)

    def observe_step(self, timing: StepTiming) -> None:
        """Learn what a step cost, and how far the forecast was off."""
        drafted = timing.draft_steps > 0
        expected = self.cost.step_seconds(timing) - self.cost.overhead
        if expected > 0.0 and timing.verify_rows and self.cost.known:
            miss = max(-0.3, min(0.3, timing.device_seconds / expected - 1.0))
            self._missed[drafted] += MISS_RATE * (miss - self._missed[drafted])
            self._missed[not drafted] *= 0.998  # what was learnt of the other kind grows old
            self._scatter += MISS_RATE * (abs(miss) - self._scatter)
        self.cost.observe(timing)

    def forget(self, order: int) -> None:
        """A request has left: its length tells how long others will last."""
        self.survival.forget(order)
        emitted = self._outputs.pop(order, 0)
        if emitted:
            self._mean_output += 0.05 * (emitted - self._mean_output)


def _reach(curve: Sequence[float], threshold: float, longest: int) -> int:
    """How many positions of a falling curve lie above the threshold."""
    reach = 0
    for value in curve[:longest]:
        if value <= threshold:
            break
        reach += 1
    return reach


def _urgency(view: RequestView) -> float:
    """1 for a request within its target; up to 2 for one whose last output lies further back."""
    late = view.since_output * 1e3
    return 1.0 if late <= view.slo_tpot else min(2.0, late / view.slo_tpot)


class TemperatureSearch:
    """Finds the drafter temperature with the most accepted tokens, by kind of request: a hill climb on a grid.

    One draft in four is drawn a step to the side of the best so far, turn by turn within each request, so that both see
    the same text. The better one stays when the difference is beyond chance; where it is not, the other side gets its
    turn, and rounds grow longer. It never leaves 0.6..1.6, and never asks about drawn tokens: only counts.
    """

    SHARE = 4
    ROUND = 200  # trials of the challenger before a verdict

    def __init__(self) -> None:
        self._kinds: dict[Kind, _Climb] = {}

    def choose(self, kind: Kind, order: int, turn: int) -> float:
        """τ for the next draft of a request; `turn` moves on with its confirmed tokens."""
        climb = self._kinds.setdefault(kind, _Climb())
        # Knuth's multiplicative hash: which turns try the challenger must not follow any rhythm of the text
        pick = ((order * 40503 + turn) * 2654435761) & 0xFFFFFFFF
        return climb.challenger if pick >> 16 & 0xFF < 256 // self.SHARE else climb.best

    def observe(self, seen: Observation) -> None:
        """Count a draft's trials for the temperature it was drawn with."""
        climb = self._kinds.get(kind_of(False, seen.coupled, seen.temperature, None))
        if climb is not None:
            climb.add(seen.tau, seen.accepted, min(seen.accepted + 1, seen.drafted), self.ROUND)

    def best(self, kind: Kind) -> float:
        """The best so far for a kind of request."""
        climb = self._kinds.get((kind[0], kind[1], None))
        return climb.best if climb else 1.0


class _Climb:
    """One kind's hill climb."""

    def __init__(self) -> None:
        self.best = 1.0
        self.direction = -1
        self.patience = 1  # rounds without a verdict make the next longer
        self._reset()

    @property
    def challenger(self) -> float:
        """The neighbour being tried."""
        return round(min(TAU_HIGH, max(TAU_LOW, self.best + self.direction * TAU_STEP)), 1)

    def _reset(self) -> None:
        self.counts = {"best": [0, 0], "challenger": [0, 0]}  # accepted, trials

    def add(self, tau: float, accepted: int, trials: int, length: int) -> None:
        """Count, and judge when there is enough."""
        who = "best" if abs(tau - self.best) < 0.01 else "challenger" if abs(tau - self.challenger) < 0.01 else None
        if who is None:  # drawn before the last move
            return
        self.counts[who][0] += accepted
        self.counts[who][1] += trials
        (a, n), (b, m) = self.counts["best"], self.counts["challenger"]
        if m < length or n < length or m % 20:
            return
        pooled = (a + b) / (n + m)
        spread = math.sqrt(max(1e-12, pooled * (1.0 - pooled) * (1.0 / n + 1.0 / m)))
        z = (b / m - a / n) / spread
        if z > 2.5:
            self.best, self.patience = self.challenger, 1
            self._reset()
        elif z < -1.0 or m >= length * 4 * self.patience:
            self.direction = -self.direction
            self.patience = min(8, self.patience + 1)
            self._reset()
        if self.challenger == self.best:  # at the end of the range
            self.direction = -self.direction


def make_controller(name: str, max_draft: int, cost: CostModel | None = None) -> Controller:
    """The controller of that name."""
    if name == "fixed":
        return FixedController(max_draft)
    if name == "threshold":
        return ThresholdController(max_draft)
    if name == "throughput":
        return ThroughputController(cost, max_draft)
    raise ConfigError(f"--controller {name!r} is not known; choose from throughput, threshold, fixed")
