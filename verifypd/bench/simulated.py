"""An arm in the simulator: the engine's own policies on a manual clock, with the costs of a named GPU or of a file.

The H200's costs are measured, with a 7B verifier and a 1.1B draft. Other GPUs' are scaled from them: what reads memory
by bandwidth, what computes by peak arithmetic; other pairs' by parameters and by the size of their keys and values.
Knows costs and workloads; nothing of torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from verifypd.bench.figures import Outcome, Record
from verifypd.bench.play import Answer, Drafts
from verifypd.bench.tuned import Policy
from verifypd.bench.workload import Arrival, Workload
from verifypd.control.architectures import Architecture
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.snapshot import Plan, Snapshot
from verifypd.errors import ConfigError
from verifypd.models.builtin import find
from verifypd.models.config import ModelConfig
from verifypd.simulate.engine import Simulation
from verifypd.simulate.tables import h200
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import Settings, TrueCosts, gpu_settings

VERIFIER, DRAFT = "llama-2-7b", "tinyllama-1.1b"  # of the measured table
NOISE = 0.03  # of every pass, as a standard deviation of its logarithm
TEXT = 128  # tokens of a prompt that is a text


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU does at most, by its maker."""

    bandwidth: float  # TB/s
    arithmetic: float  # TFLOP/s in bf16, dense


GPUS = {
    "h200": Device(4.8, 989),
    "h100": Device(3.35, 989),
    "a100": Device(2.04, 312),
    "l40s": Device(0.864, 362),
    "rtx4090": Device(1.01, 165),
}
MEMORY = ("base", "context", "draft_start", "draft_step", "draft_context")  # bound by bandwidth
COMPUTE = ("row", "steep", "chunk_context", "mixed", "draft_row")  # by arithmetic


def device_costs(name: str) -> Coefficients:
    """Costs of the 7B verifier and the 1.1B draft on a GPU."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name!r} is not known; give one of {', '.join(GPUS)}, or --costs FILE")
    ours, own = GPUS["h200"], GPUS[name]
    slower, duller = ours.bandwidth / own.bandwidth, ours.arithmetic / own.arithmetic
    measured = h200().coefficients
    scaled = {each: getattr(measured, each) * slower for each in MEMORY}
    scaled |= {each: getattr(measured, each) * duller for each in COMPUTE}
    return replace(measured, **scaled, knee=measured.knee * slower / duller)


def pair_costs(costs: Coefficients, text: str) -> Coefficients:
    """Those of another pair, DRAFT:VERIFIER by name."""
    draft, _, verifier = text.partition(":")
    ours, own = _shape(VERIFIER), _shape(verifier)
    small, own_small = _shape(DRAFT), _shape(draft)
    size, drafts = own.parameters / ours.parameters, own_small.parameters / small.parameters
    changed = {name: getattr(costs, name) * size for name in ("base", "row", "steep", "mixed")}
    changed |= {name: getattr(costs, name) * drafts for name in ("draft_start", "draft_step", "draft_row")}
    changed["context"] = costs.context * _kept(own) / _kept(ours)
    changed["draft_context"] = costs.draft_context * _kept(own_small) / _kept(small)
    wide = own.layers * own.heads * own.head_dim / (ours.layers * ours.heads * ours.head_dim)
    return replace(costs, **changed, chunk_context=costs.chunk_context * wide)


def _shape(name: str) -> ModelConfig:
    known = find(name)
    if known is None:
        raise ConfigError(f"--pair: {name!r} is no built-in model; a simulation needs its shape")
    return known.config


def _kept(shape: ModelConfig) -> int:
    """Numbers kept for a token of context."""
    return shape.layers * shape.kv_heads * shape.head_dim


def read_costs(path: Path) -> Coefficients:
    """What `verifypd costs --json` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(Coefficients)}
        given = {name: float(value) for name, value in data["coefficients"].items() if name in known}
        knee = {"knee": float(data["knee"])} if data.get("knee") else {"knee": 1e9, "steep": 0.0}
        return Coefficients(**{**dict.fromkeys(known, 0.0), **given, **knee})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--costs {path}: give what `verifypd costs --json` writes ({error!r})") from None


class _Counted(Simulation):
    """Adds up what its batches take."""

    seconds: dict[str, float]

    def timing(self, plan: Plan) -> StepTiming:
        found = super().timing(plan)
        for name in ("prefill", "draft", "verify"):
            self.seconds[f"{name}_s"] += getattr(found, f"{name}_seconds")
        self.seconds["chunks_s"] += found.chunk_seconds
        return found


class Simulated:
    """One policy under some costs."""

    def __init__(
        self, name: str, policy: Policy, costs: Callable[[str], Coefficients], where: str, alpha: float, drafts: int,
        targets: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """costs: of a pair by its name. where: whose costs they are. alpha: chance that a draft token stands. targets:
        slo_ttft and slo_tpot of the server, ms, where they are other than by default."""
        self._name = name
        self.policy, self.costs, self.where, self.alpha, self.max_draft = policy, costs, where, alpha, drafts
        self.gpu = where in GPUS
        self.targets = targets or {}
        self._settings: dict[str, Any] = {}
        self._drafts = Drafts()
        self._counts = dict.fromkeys(
            ("prefill_s", "draft_s", "verify_s", "chunks_s", "step_s", "plans_n", "plans_left_n", "draft_loops_n",
             "passes_n", "verdicts_n", "continued_n", "drafted_n"), 0.0,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """As in the protocol."""
        return self._name

    @property
    def spec(self) -> dict[str, Any]:
        """Policy and costs."""
        return {"policy": asdict(self.policy), "simulated": self.where, "alpha": self.alpha, **self.targets}

    async def start(self) -> dict[str, Any]:
        """Nothing to load."""
        return {"simulated": self.where}

    async def prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
        """settings: "pair", "batch" and "requests"."""
        self._settings = settings
        return {}

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        """Single requests have no time of their own here."""
        raise ConfigError("a simulated arm plays whole workloads")

    async def play(self, workload: Workload, seconds: float) -> Outcome:
        """The workload on the manual clock."""
        if workload.clients is not None:
            raise ConfigError("a closed loop cannot be simulated: its arrivals depend on answers")
        architecture, settings = self.world(self._settings["batch"], self._settings["requests"])
        requests = [(each.at, each.prompt_tokens or TEXT, each.output_tokens) for each in workload.arrivals]
        arrivals = replay(requests, self.alpha, seed=workload.seed)
        costs = TrueCosts(self.costs(self._settings["pair"]), noise=NOISE)
        simulation = _Counted(architecture, arrivals, costs, settings, seed=workload.seed, on_step=self._step)
        simulation.seconds = self._counts
        report = simulation.run(until=seconds)
        self._counts["step_s"] = sum(self._counts[f"{name}_s"] for name in ("prefill", "draft", "verify"))
        self._counts["verdicts_n"] += simulation.verdicts
        self._counts["continued_n"] += simulation.emitted
        self._counts["drafted_n"] += simulation.drafted
        records = []
        for own, arrival in zip(report.outcomes, workload.arrivals, strict=True):
            outputs = tuple(itertools.accumulate(own.gaps, initial=own.first)) if own.first is not None else ()
            if arrival.at <= report.seconds:
                records.append(Record(arrival.at, arrival.at, outputs, own.tokens, min(1, own.tokens), own.finished))
        return Outcome(tuple(records), len(workload.arrivals), report.seconds)

    def world(self, batch: int, requests: int = 0) -> tuple[Architecture, Settings]:
        """Policy and settings of an engine, nothing learnt yet. requests: of the whole workload."""
        given = self.policy.settings(batch, self.max_draft)
        batch = given["batch_size"]
        slots = math.ceil(given["queue_factor"] * batch)
        made = replace(
            gpu_settings() if self.gpu else Settings(),
            batch_size=batch, max_draft=self.max_draft, queue_factor=given["queue_factor"], workers=batch,
            verify_batch=given.get("verify_batch", max(1, batch // 4)),
            spare_slots=max(0, requests - slots) if self.policy.admit_all else 0,
        )  # fmt: skip
        made = replace(made, **self.targets)
        pair = self._settings.get("pair", "")
        if verifier := find(pair.partition(":")[2]):
            made = replace(made, verifier_bytes=2 * verifier.config.parameters)
        cost = CostModel(self.costs(pair))
        controller = make_controller(self.policy.controller, self.max_draft, cost)
        architecture = make_architecture(self.policy.arch, controller, cost)
        told = architecture.observe

        def observe(seen: Observation) -> None:
            self._count(seen)
            told(seen)

        architecture.observe = observe  # type: ignore[method-assign, assignment]
        return architecture, made

    def _count(self, seen: Observation) -> None:
        stood = [int(place < seen.accepted) for place in range(seen.drafted)]
        self._drafts = self._drafts.plus(1, [1] * seen.drafted, stood)

    def _step(self, _simulation: Simulation, _snapshot: Snapshot, plan: Plan) -> None:
        self._counts["plans_n"] += not plan.empty
        self._counts["plans_left_n"] += plan.leaves_drafts
        self._counts["draft_loops_n"] += plan.draft is not None
        self._counts["passes_n"] += plan.verify is not None

    async def drafts(self) -> Drafts | None:
        """Of all runs so far."""
        return self._drafts

    def reading(self) -> dict[str, float]:
        """Counters of all runs so far. The host's work is beside the device here, and not counted."""
        return dict(self._counts)

    async def close(self) -> None:
        """Nothing to free."""
