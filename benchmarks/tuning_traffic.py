"""The traffic that `tuning.py` plays, and the figures of a run. It imports the policies: numbers are changed before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from verifypd.control.cost import CostModel
from verifypd.control.factory import make_architecture, make_controller
from verifypd.simulate.engine import Simulation
from verifypd.simulate.tables import HEAD
from verifypd.simulate.traffic import Acceptance, Arrival, poisson
from verifypd.simulate.world import TrueCosts, gpu_settings

MODEL = replace(  # with the 1.1B draft in place of the head: h200-draft-steps.json
    HEAD, draft_start=0.17e-3, draft_step=0.83e-3, draft_context=9.7e-9, draft_row=3.2e-6
)
NOISE, DRIFT, ERROR = 0.05, 0.1, 0.1  # of every pass; of all costs, slowly; of what the policy believes of each
FIGURES = ("ttft_p95", "tpot_p95", "gap_p99", "e2e_mean", "throughput")  # ms, tokens/s
AGAIN = 10_000  # what is added to a seed for other noise


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of mixed lengths, 12 % of them with long prompts."""

    rate: float  # requests/s
    alphas: tuple[float, ...]  # mean acceptance, of those who arrive in each turn
    turn: float  # s
    seconds: float
    head: bool

    def arrivals(self, seed: int) -> list[Arrival]:
        """Times and lengths are the same whatever the acceptance."""
        count = round(self.rate * self.seconds)
        each = [poisson(self.rate, count, Acceptance(alpha), seed=seed) for alpha in self.alphas]
        return [alike[int(alike[0].time // self.turn) % len(alike)] for alike in zip(*each, strict=True)]


TRAFFIC = {
    "steady": Traffic(16.0, (0.8,), 1.0, 6.0, head=True),
    "changing": Traffic(16.0, (0.25, 0.8), 4.0, 12.0, head=False),  # drafts do not pay, then do, then do not
    "poor": Traffic(16.0, (0.15,), 1.0, 4.0, head=False),  # they never do
    "overload": Traffic(44.0, (0.8,), 1.0, 5.0, head=False),  # some prompts wait until they are overdue
}


def play(kind: str, seed: int, again: int = 0) -> dict[str, float]:
    """One run. again: other than 0, the same with other noise."""
    traffic = TRAFFIC[kind]
    believed = CostModel(HEAD if traffic.head else MODEL)
    truth = TrueCosts(believed.coefficients, noise=NOISE, drift=DRIFT).off_by(ERROR, seed)
    policy = make_architecture("auto", make_controller("throughput", 4, believed), believed)
    settings = gpu_settings(batch_size=128, max_draft=4, head=traffic.head)
    report = Simulation(policy, traffic.arrivals(seed), truth, settings, seed=seed + AGAIN * again).run()
    found, ends = report.summary(), [each.last or report.seconds for each in report.outcomes]
    found["e2e_mean"] = 1e3 * fmean(end - each.arrival for end, each in zip(ends, report.outcomes, strict=True))
    found["changes"] = float(policy.state()["decisions"])  # of mode
    return {figure: round(found[figure], 4) for figure in (*FIGURES, "changes")}
