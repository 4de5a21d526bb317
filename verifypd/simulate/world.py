"""The world a simulation runs in: what passes really take, and how the server is set. Knows no policy."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from verifypd.control.cost import Coefficients, CostModel
from verifypd.simulate.traffic import Arrival


@dataclass(frozen=True, slots=True)
class TrueCosts:
    """What passes really take: the cost model's formula, but not what the policy believes; noisy and drifting."""

    coefficients: Coefficients = field(default_factory=Coefficients)
    noise: float = 0.0  # standard deviation of the logarithm, each pass
    drift: float = 0.0  # amplitude of a slow swing of all costs
    drift_period: float = 20.0  # s

    def off_by(self, error: float, seed: int) -> TrueCosts:
        """The same with every coefficient multiplied by 1 − error or 1 + error, at random."""
        rng = random.Random(f"costs/{seed}")
        wrong = {name: value * (1 + rng.choice((-error, error))) for name, value in asdict(self.coefficients).items()}
        return replace(self, coefficients=Coefficients(**wrong))

    def model(self) -> CostModel:
        """The formula with these coefficients."""
        return CostModel(self.coefficients)

    def factor(self, now: float, rng: random.Random) -> float:
        """What this moment multiplies a pass by."""
        swing = 1 + self.drift * math.sin(2 * math.pi * now / self.drift_period) if self.drift else 1.0
        return swing * (math.exp(rng.gauss(0.0, self.noise)) if self.noise else 1.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """The server's settings, by the names of the command line."""

    batch_size: int = 32
    queue_factor: float = 1.2
    max_draft: int = 8
    prefill_chunk: int = 2048
    draft_chunk: int = 1024
    verify_batch: int = 16
    verify_wait_ms: float = 4.0
    workers: int = 4
    slo_ttft: float = 500.0  # ms
    slo_tpot: float = 15.0  # ms
    slo_gap: float = 30.0  # ms
    head: bool = False  # whether the drafter is a head, which reads its drafts again, and prompts behind the verifier
    head_token: float = 0.0  # s for each prompt token that a head reads
    max_tokens: int = 1024  # what requests ask for at most; most end sooner
    drafter: str | None = "model"
    drafter_has_cache: bool = True
    late: bool = False  # the host plans while the device runs: verdicts reach it one step late
    padded: bool = False  # passes have the sizes that are captured
    host_seconds: float = 0.0  # s of each step on the host; beside the device where verdicts are late
    host_request: float = 0.0  # s more for each request that runs
    verifier_bytes: int = 13_500_000_000
    spare_slots: int = 0  # slots beyond those the engine gives itself: backpressure is then the policy's alone

    def targets(self, own: Arrival, expected: float) -> tuple[float, float]:
        """ms for a request's first token and each further one, as the engine has them: no first token within less than
        a step may last, no further one within less than 1 ms; a deadline leaves half for each. expected: tokens."""
        first = self.slo_ttft if own.slo_ttft is None else own.slo_ttft
        further = self.slo_tpot if own.slo_tpot is None else own.slo_tpot
        if own.deadline_ms is not None:
            half = own.deadline_ms / 2
            first, further = min(first, half), min(further, half / max(1.0, expected))
        return max(first, self.slo_gap), max(further, 1.0)

    @property
    def slots(self) -> int:
        """Requests that may hold a slot at once."""
        return math.ceil(self.batch_size * self.queue_factor) + self.spare_slots


def gpu_settings(**changes: Any) -> Settings:
    """As the engine runs on CUDA: passes are padded, and planned while the one before runs.

    Times are those beside an H200. Host, with a head at commit 0cf8c10: 2.09, 2.45, 3.53 and 9.40 ms a step at 1, 8, 32
    and 128 requests; the line through them is off by 7 % at most.
    Head: 0.28 s of a run recorded at 7212482 lie between its steps; it read 160,374 prompt tokens in them.
    """
    gpu = Settings(late=True, padded=True, host_seconds=2.0e-3, host_request=55e-6, head_token=1.7e-6, slo_ttft=200.0)
    return replace(gpu, **changes)
