"""Chooses the architecture, the prefill chunk and the queue factor at run time, and keeps a record of why.

Stands over the other policies: what it answers is always the plan of one of them. Draft lengths are the controller's.
With the `throughput` controller, drafting nothing is one of the choices; a switch needs a foretold gain beyond the
errors made lately, and what was foretold is held against what came. Under `fixed` and `threshold` only the architecture
is its own. Pure: no clock, no torch, no logging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from verifypd.control.architectures import PD, PDV, Architecture, Unified, decoding
from verifypd.control.chunks import draft_chunk, prefill_chunk
from verifypd.control.controller import Controller
from verifypd.control.cost import CostModel
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.snapshot import Plan, RequestView, Snapshot
from verifypd.control.throughput import ThroughputController

INTERVAL = 16  # steps between two looks
PATIENCE = 3  # looks in a row that must agree before it switches
DWELL = 8  # looks after a switch before the next
CALM = 16  # steps for which prompts that were late must not be, before drafts are as long again as they pay
KEEP = 1000  # decisions remembered


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of mind."""

    step: int
    time: float  # s of the engine's clock
    previous: str
    architecture: str
    reason: str
    predicted: dict[str, float]  # architecture → tokens a second


class Auto:
    """The policy over the policies. `plain` is `unified` with nothing drafted, plan for plan, and is named when so.

    `baseline` is not among the choices: at one worker it is `pd` with one request, with more it only reads the weights
    more often.
    """

    name = "auto"
    speculative = True

    def __init__(
        self,
        controller: Controller,
        cost: CostModel | None = None,
        *,
        overlap: bool = False,
        margin: float = 0.02,
        adapt: bool = True,
    ) -> None:
        self.controller = controller
        self._throughput = controller if isinstance(controller, ThroughputController) else None
        self._own_cost = cost or (self._throughput.cost if self._throughput else CostModel())
        self.overlap = overlap  # whether drafts run on a device of their own, beside the verifier
        self.margin_floor = margin
        self.adapt = adapt  # whether it moves the prefill chunk and the queue factor
        self.choices: dict[str, Architecture] = {
            "unified": Unified(controller),
            "pd": PD(controller),
            "pdv": PDV(controller),
        }
        self.running = "unified"  # whose plans it answers with
        self.label = "unified"  # the same, or "plain" while nothing is drafted
        self.decisions: list[Decision] = []  # the latest
        self.decided = 0  # all there were
        self.predicted: dict[str, float] = {}  # tokens a second, smoothed
        self.queue_factor: float | None = None  # None: the setting
        self.prefill_chunk: int | None = None
        self._calm = 0  # steps since prompts were last late
        self._prompts = False  # whether prompts were waiting at the last plan
        self._pressed = False  # whether prompts that wait are late, or were when they were last looked at
        self._fidelity: dict[str, float] = {}  # architecture → measured / foretold tokens a second
        self._scatter = 0.0
        self._looks = 0
        self._agree: tuple[str, int] = ("", 0)
        self._since_switch = DWELL
        self._last: tuple[float, bool] | None = None  # time of the last plan, and whether requests were decoding
        self._emitted = 0
        self._busy = 0.0
        self._steps = 0

    @property
    def ran(self) -> str:
        """The chosen one's, or `plain` while nothing is drafted."""
        return "plain" if self.label == "plain" else self.choices[self.running].ran

    @property
    def curious(self) -> bool:
        """As its controller is; and when it is about to weigh the architectures."""
        return self.controller.curious or ((self._steps + 1) % INTERVAL == 0 and not self._resting)

    @property
    def drafting(self) -> bool:
        """As its controller does."""
        return self.controller.drafting

    @property
    def at_rest(self) -> bool:
        """While nothing is drafted, no prompt was waiting, and its controller does not look."""
        return self._resting and not (self._pressed or self.controller.curious)

    @property
    def cost(self) -> CostModel:
        """What passes are believed to take."""
        return self._own_cost

    # -- the policy ---------------------------------------------------------------------------------------------------

    def plan(self, snapshot: Snapshot) -> Plan:
        """What the next step runs."""
        ready = [view for view in snapshot.requests if not view.prefill_left and view.room > 0]
        self._clock(snapshot, ready)
        if self._resting:
            self._emitted, self._busy = 0, 0.0  # nothing was foretold of this time
        self._prompts = any(view.prefill_left for view in snapshot.requests)
        self._steps += 1
        tuned = self._tune(snapshot, ready)
        if ready and self._steps % INTERVAL == 0 and not self._resting:
            self._look(tuned)
        plan = self.choices[self.running].plan(tuned)
        self._relabel(snapshot, ready)
        return plan

    def observe(self, observation: Observation) -> None:
        """A verdict was absorbed."""
        self._emitted += observation.emitted
        self.controller.observe(observation)

    def observe_step(self, timing: StepTiming) -> None:
        """The batches of a plan have run."""
        self.controller.observe_step(timing)
        if self._throughput is None or self._throughput.cost is not self._own_cost:
            self._own_cost.observe(timing)

    def forget(self, order: int, emitted: int) -> None:
        """A request has left for good, with so many output tokens."""
        self.controller.forget(order, emitted)

    def state(self) -> dict[str, float | str]:
        """What it has chosen, how often it has changed its mind, and what its controller believes."""
        chosen: dict[str, float | str] = {"architecture": self.ran, "decisions": self.decided}
        known = {} if self._resting else self.predicted
        foretold = {f"foretold_{name}": rate for name, rate in known.items()}  # tokens a second
        return chosen | self.controller.state() | foretold

    # -- which architecture -------------------------------------------------------------------------------------------

    @property
    def margin(self) -> float:
        """Gain that must be foretold before it switches: grows with the errors made lately."""
        return self.margin_floor + 0.5 * min(0.2, self._scatter)

    def _look(self, snapshot: Snapshot) -> None:
        """Weigh the architectures; switch when one has been clearly better for a while."""
        self._looks += 1
        self._since_switch += 1
        self._hold_to_account()
        old = self.predicted
        fresh = self.predict(snapshot)
        self.predicted = {
            name: old.get(name, rate) + 0.3 * (rate - old.get(name, rate)) for name, rate in fresh.items()
        }
        own = self._fidelity.get(self.running, 1.0)
        scores = {name: rate * self._fidelity.get(name, own) for name, rate in self.predicted.items()}
        here = scores.get(self.running, 0.0)
        best = max(scores, key=lambda name: scores[name], default=self.running)
        if best == self.running or scores[best] <= here * (1.0 + self.margin):
            self._agree = ("", 0)
            return
        self._agree = (best, self._agree[1] + 1 if self._agree[0] == best else 1)
        disappointed = self._fidelity.get(self.running, 1.0) < 0.9 * self._fidelity.get(best, 1.0)
        if self._agree[1] >= PATIENCE and (disappointed or self._since_switch >= DWELL):
            gain = scores[best] / here if here else 1.0
            reason = f"foretold {100 * (gain - 1):.0f} % faster than {self.running} (margin {100 * self.margin:.1f} %)"
            self._switch(snapshot, best, best, reason)

    def predict(self, snapshot: Snapshot) -> dict[str, float]:
        """Tokens a second of each architecture for what is in flight now."""
        views = decoding(snapshot)[: snapshot.batch_size]
        if not views:
            return {}
        apart = replace(snapshot, requests=tuple(view for view in snapshot.requests if not view.prefill_left))
        prefill = self._prefill_seconds(snapshot)
        half = views[: max(1, len(views) // 2)]
        alone = replace(apart, requests=tuple(half))
        riding = self._aside(
            views, snapshot
        )  # every architecture computes the prompts: what counts is what else it does
        rates = {
            "unified": self._best_rate(views, snapshot, 0.0, riding, False),
            "pd": self._best_rate(views, apart, prefill, riding, False),
        }
        if len(views) >= 2 and snapshot.drafter is not None:
            rates["pdv"] = self._best_rate(half, alone, prefill, riding, self.overlap)
        return rates

    def _aside(self, views: Sequence[RequestView], snapshot: Snapshot) -> float:
        """What prompt chunks add to a pass in which they ride, at least: seconds that no architecture can save."""
        rows, context = float(len(views)), float(sum([view.length_bound for view in views]))
        chunk, riding, square = self._chunk(snapshot)
        with_chunk = self.cost.verify_seconds(rows + chunk, context + riding, square)
        return with_chunk - self.cost.verify_seconds(rows, context)

    def _best_rate(
        self, views: Sequence[RequestView], snapshot: Snapshot, prefill: float, aside: float, overlap: bool
    ) -> float:
        """Most tokens a second of these requests, a pass of `prefill` seconds beside each step, `aside` not counted."""
        if self._throughput is None:
            lengths = list(self.controller.draft_lengths(views, snapshot).values()) if snapshot.drafter else []
            context = float(sum([view.length_bound for view in views]))
            draft = self.cost.draft_seconds(max(lengths, default=0), 0.0, context)
            passes = self.cost.verify_seconds(len(views) + sum(lengths), context) + prefill
            seconds = (max(draft, passes) if overlap else draft + passes) - (aside if prefill else 0.0)
            return len(views) / seconds
        options = self._throughput.predict(views, snapshot, overlap)
        best = max(options, key=lambda option: option.rate)
        verify = best.seconds - best.draft_seconds if not overlap else best.seconds
        seconds = max(best.draft_seconds, verify + prefill) if overlap else best.seconds + prefill
        return best.tokens / max(seconds - aside, 0.1 * seconds)

    def _prefill_seconds(self, snapshot: Snapshot) -> float:
        """A pass of its own over the next prompt chunks."""
        return self.cost.verify_seconds(*self._chunk(snapshot))

    @staticmethod
    def _chunk(snapshot: Snapshot) -> tuple[float, float, float]:
        """Rows, Σ context and Σ chunk × context of the next prompt chunks."""
        left, context, square = snapshot.prefill_chunk, 0.0, 0.0
        for view in snapshot.requests:
            take = min(left, view.prefill_left)
            left -= take
            context += (view.chunk_start + take) if take else 0
            square += take * (view.chunk_start + take)
        return float(snapshot.prefill_chunk - left), context, square

    def _hold_to_account(self) -> None:
        """Hold what was foretold of the running architecture against what came since the last look."""
        foretold, emitted, busy = self.predicted.get(self.running), self._emitted, self._busy
        self._emitted, self._busy = 0, 0.0
        if not foretold or busy <= 0.0 or not emitted or self._since_switch < 2:
            return
        ratio = max(0.5, min(2.0, emitted / busy / foretold))
        own = self._fidelity.get(self.running, 1.0)
        self._scatter += 0.1 * (abs(ratio - own) * 0.3 - self._scatter)  # of a mean over ten looks
        self._fidelity[self.running] = own + 0.1 * (ratio - own)
        for name in self._fidelity:
            if name != self.running:  # what was learnt of the others grows old
                self._fidelity[name] += 0.02 * (self._fidelity[self.running] - self._fidelity[name])

    def _clock(self, snapshot: Snapshot, ready: Sequence[RequestView]) -> None:
        """Count the time in which requests were decoding."""
        if self._last is not None and self._last[1]:
            self._busy += max(0.0, snapshot.now - self._last[0])
        self._last = (snapshot.now, bool(ready))

    def _idle(self, snapshot: Snapshot) -> bool:
        """Whether nothing is drafted but probes; controllers of fixed rules draft whatever comes."""
        return snapshot.drafter is None or (self._throughput is not None and not self._throughput.speculating)

    @property
    def _resting(self) -> bool:
        """Whether nothing is drafted and no prompt waits: all architectures that draft in line then plan the same."""
        return self.label == "plain" and self.running == "unified" and not (self.overlap or self._prompts)

    def _relabel(self, snapshot: Snapshot, ready: Sequence[RequestView]) -> None:
        """`plain` is the running architecture with nothing drafted: note when that begins and ends."""
        if not ready or self.running != "unified":
            return
        label = "plain" if self._idle(snapshot) else "unified"
        if label == self.label:
            return
        if snapshot.drafter is None:
            reason = "no drafter"
        elif self._throughput is not None:
            gain, margin = self._throughput.gain, self._throughput.margin
            reason = f"drafting foretold to gain {100 * (gain - 1):.1f} % (margin {100 * margin:.1f} %)"
        else:
            reason = "drafting"
        self._switch(snapshot, self.running, label, reason)

    def _switch(self, snapshot: Snapshot, running: str, label: str, reason: str) -> None:
        if running != self.running or label != self.label:
            self._emitted, self._busy = 0, 0.0  # what comes is held against what is foretold now
        if running != self.running:
            self._since_switch = 0
            self._agree = ("", 0)
        if not self.predicted or self.label == "plain":  # what was foretold before a rest is old
            self.predicted = self.predict(snapshot)
        decision = Decision(snapshot.step, snapshot.now, self.label, label, reason, dict(self.predicted))
        self.running, self.label = running, label
        if self._throughput is not None:
            self._throughput.overlap = self.overlap and running == "pdv"
        if len(self.decisions) >= KEEP:
            del self.decisions[: KEEP // 2]
        self.decisions.append(decision)
        self.decided += 1

    # -- chunk and queue ----------------------------------------------------------------------------------------------

    def _tune(self, snapshot: Snapshot, ready: Sequence[RequestView]) -> Snapshot:
        """The snapshot with this policy's own settings in it."""
        if not self.adapt:
            return snapshot
        if self._steps % INTERVAL == 0 or self.queue_factor is None:
            self.queue_factor = self._next_queue_factor(snapshot, ready)
        chosen = self._throughput.chosen if self._throughput else None
        stretch = self._throughput.stretch if self._throughput else 1.0
        idle = self._idle(snapshot)
        if self.at_rest:
            self._calm += 1
            self.prefill_chunk = snapshot.prefill_chunk
            return snapshot  # nothing to tune: the plan is that of `plain`
        drafting = None if idle else chosen
        chunk = prefill_chunk(snapshot, ready, self.cost, drafting, stretch, self.running != "unified", idle)
        self.prefill_chunk = chunk.tokens
        self._calm = 0 if chunk.pressed else self._calm + 1
        waiting = bool(snapshot.away) or self._prompts
        self._pressed = waiting and (chunk.pressed or (self._pressed and self._calm < CALM))
        verify_batch = snapshot.verify_batch
        if self.running == "pdv":
            verify_batch = max(1, min(snapshot.batch_size, len(ready)) // 2)
        return replace(
            snapshot,
            prefill_chunk=self.prefill_chunk,
            draft_chunk=draft_chunk(snapshot, self.cost, chosen),
            queue_factor=self.queue_factor,
            verify_batch=verify_batch,
            pressed=self._pressed,
        )

    def _next_queue_factor(self, snapshot: Snapshot, ready: Sequence[RequestView]) -> float:
        """More prompts made ready where the batch runs short of requests, fewer where ready ones wait too long."""
        factor = snapshot.queue_factor if self.queue_factor is None else self.queue_factor
        short = len(ready) < snapshot.batch_size and any(view.prefill_left == 1 for view in snapshot.requests)
        if short:
            return min(2.0, round(factor + 0.1, 1))
        late = len(ready) > snapshot.batch_size and any(v.since_output * 1e3 > 2.0 * v.slo_tpot for v in ready)
        if late:
            return max(1.0, round(factor - 0.1, 1))
        return factor
