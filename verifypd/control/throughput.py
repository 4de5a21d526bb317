"""The `throughput` controller: drafts what costs least by the cost model and the acceptance seen, nothing where nothing
pays.

Sees confirmed lengths, load, counts of accepted tokens and times; never a drawn draft token, so that no choice can bias
what is written. No torch, no clock, no logging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verifypd.control.acceptance import Acceptance, kind_of
from verifypd.control.controller import Controller, allowed, decode_work
from verifypd.control.cost import CostModel
from verifypd.control.lengths import Drafting, Load, Option, best_two, options
from verifypd.control.mode import Mode, ProbeBudget, next_mode
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.prompts import Reading
from verifypd.control.snapshot import RequestView, Snapshot
from verifypd.control.temperature import TemperatureSearch
from verifypd.control.tuning import REVIEW_EVERY


class ThroughputController(Controller):
    """Drafts at the least seconds a token.

    While that is no draft at all (`Mode.PLAIN`) a small share of the time goes to drafts of one token, so that a change
    is noticed.
    """

    def __init__(self, cost: CostModel | None = None, max_draft: int = 8, *, search_temperature: bool = False) -> None:
        self.cost = cost or CostModel()
        self.max_draft = max_draft
        self.acceptance = Acceptance(max_draft)
        self.search = TemperatureSearch() if search_temperature else None
        self.mode = Mode.DRAFTING
        self.budget = ProbeBudget()
        self.chosen: Option | None = None  # of the last step that was weighed
        self.runner_up: Option | None = None
        self._probe_price = 0.0  # s, when the choice was last weighed
        self._alone: Option | None = None  # what was best, or would have been, without prompts beside it
        self._worth = 0.0  # s that a token might take beside the prompts of that step at least; 0: no prompts
        self._unweighed = 0  # steps since the choice was last weighed
        self._weighed = 0  # step for which it was
        self._lookups: dict[int, tuple[int, int]] = {}  # request → look-ups that would have stood, of all, as last seen

    @property
    def may_draft(self) -> bool:
        """Whether the next step may draft; while not, nobody needs to say what could be proposed."""
        if self.drafting or self._unweighed >= REVIEW_EVERY:
            return True
        return self.budget.affords(self._probe_price or self.cost.draft_seconds(1, 0.0, 0.0))

    @property
    def drafting(self) -> bool:
        """Whether it drafts at present, and does not only try now and then whether it should."""
        return self.mode is Mode.DRAFTING

    # -- the choice ---------------------------------------------------------------------------------------------------

    def draft_lengths(self, views: Sequence[RequestView], snapshot: Snapshot, riding: Reading) -> dict[int, int]:
        """slot → tokens to draft for each request, beside the prompt chunks that ride in the pass."""
        self._overhear(views, snapshot)
        able = [(view, most) for view in views if (most := allowed(view, self.max_draft))]
        if not able or not self.may_draft:
            return {}
        self._unweighed, self._weighed = 0, snapshot.step + 1
        share = sum([1.0 for view in snapshot.requests if not view.prefill_left]) / len(snapshot.requests)
        joining = [each for view, most in able if (each := self._drafting(view, most, snapshot, share))]
        load = Load(len(views), decode_work(views))
        plain, *drafts = options(joining, load, self.cost)
        best, second = best_two(drafts or [plain])
        self.runner_up = plain if second is best else second
        self.gain = plain.per_token / best.per_token
        self._probe_price, probed = self._probe([view for view, _ in able], snapshot)
        self.mode = next_mode(self.mode, self.gain, self.acceptance.doubt, self.budget.affords(self._probe_price))
        if self.mode is Mode.DRAFTING:
            self._alone = best
            self._worth = share * best.per_token / riding.second if riding.spans else 0.0
            if riding.spans:
                found = options(joining, replace(load, riding=riding.work), self.cost, self._worth)
                best, self.runner_up = best_two(found, self._worth)
            self.chosen = best
            return best.lengths
        self._alone, self.chosen, self.runner_up, self._worth = plain, plain, best, 0.0
        if self.mode is Mode.PLAIN:
            return {}
        self.budget.pay(self._probe_price)
        return probed

    def _drafting(self, view: RequestView, most: int, snapshot: Snapshot, share: float) -> Drafting | None:
        """Its draft of `most` tokens; None where bringing its drafter's cache up to date takes twice what it saves.
        share: of requests with a slot that decode. Only they save, all wait for the drafter; tokens cost less there."""
        kind = kind_of(view.greedy, view.coupled, view.temperature, view.proposer or snapshot.drafter)
        curve, lag = self.acceptance.curve(view.request_id, kind), 0.0
        if snapshot.drafter_has_cache and view.proposer is None:
            debt, left = max(0, view.draft_lag - snapshot.routine_lag), view.expected_left(snapshot.mean_output)
            lag = max(1, min(view.draft_lag, snapshot.routine_lag)) + debt / left
            if debt and self._alone is not None:
                price = self.cost.draft_seconds(0, debt, 0.0) - self.cost.draft_seconds(0, 1, 0.0)
                more = sum(curve[: max(1, self._alone.longest)])
                saved = left * more / (1.0 + more) * self._alone.per_token
                if 2.0 * saved * share**2 <= price:  # its own time counts, too
                    return None
        return Drafting(view.slot, curve[:most], view.length_bound, lag, view.proposer is not None)

    def _probe(self, able: Sequence[RequestView], snapshot: Snapshot) -> tuple[float, dict[int, int]]:
        """What a draft of one token for the requests whose drafters lag least costs (s), and for whom."""
        lags = sorted((view.draft_lag, view.slot) for view in able if view.proposer is None)
        launch, row = self.cost.draft_seconds(1, 0.0, 0.0), self.cost.slope(len(able))
        chosen: dict[int, int] = {}
        rows, price = 0, 0.0
        for lag, slot in lags:  # the launch is paid once: those who add less than it costs come with it
            rows += lag if snapshot.drafter_has_cache else 0
            more = self.cost.draft_seconds(1, rows, 0.0) + row * (len(chosen) + 1)
            if chosen and more > 2.0 * launch:
                break
            chosen[slot], price = 1, more
        return price, chosen

    def temperature(self, view: RequestView) -> float:
        """1, unless the search is on and has found or is trying something else for this kind of request."""
        if self.search is None or view.greedy:
            return 1.0
        kind = kind_of(False, view.coupled, view.temperature, None)
        return self.search.choose(kind, view.request_id, view.length_floor)

    # -- learning -----------------------------------------------------------------------------------------------------

    def _overhear(self, views: Sequence[RequestView], snapshot: Snapshot) -> None:
        """While nothing is drafted, the texts tell how look-ups would have fared."""
        if snapshot.copier is None or self.mode is Mode.DRAFTING:
            return
        for view in views:
            stood, trials = self._lookups.get(view.request_id, (0, 0))
            if view.lookups[1] > trials:
                kind = kind_of(view.greedy, view.coupled, view.temperature, snapshot.copier)
                self.acceptance.overhear(view.request_id, kind, view.lookups[0] - stood, view.lookups[1] - trials)
            self._lookups[view.request_id] = view.lookups

    def observe(self, seen: Observation) -> None:
        """Learn how a draft fared."""
        self.acceptance.observe(seen, probed=self.mode is not Mode.DRAFTING)
        if self.search is not None and seen.drafted and not seen.greedy:
            self.search.observe(seen)

    def observe_step(self, timing: StepTiming) -> None:
        """A share of the time without drafts may go to probes."""
        if not self.drafting:
            self._unweighed += 1
            self.budget.save(timing.seconds)

    def forget(self, request_id: int) -> None:
        """A request has left."""
        self.acceptance.forget(request_id)
        self._lookups.pop(request_id, None)

    def why(self) -> dict[str, Any]:
        """The step for which drafts were last weighed; longest draft, tokens and ms of the choice, and of the next."""
        if self.chosen is None or self.runner_up is None:
            return {}
        said: dict[str, Any] = {"mode": self.mode.value, "weighed": self._weighed, "worth_ms": 1e3 * self._worth}
        for prefix, each in {"next_": self.runner_up, "": self.chosen}.items():
            if not prefix or each is not self.chosen:
                ms = 1e3 * each.seconds
                said |= {f"{prefix}longest": each.longest, f"{prefix}tokens": each.tokens, f"{prefix}ms": ms}
        return said

    def state(self) -> dict[str, float | str]:
        """What it predicts, and how far its predictions have been off; of the step it chose, tokens and ms."""
        step = {"step_tokens": chosen.tokens, "step_ms": 1e3 * chosen.seconds} if (chosen := self.chosen) else {}
        return step | {
            "mode": self.mode.value,
            "draft_length": chosen.longest if chosen and self.drafting else 0,
            "gain": self.gain,
            "margin": self.acceptance.doubt,
            "acceptance": self.acceptance.mean(),
            "calibration_error": self.acceptance.reliability.error,
            "cost_error": self.cost.error,
            "probes": self.budget.probes,
        }
