"""Tables of simulated clusters: what they take, who gets a call, deaths, and Ray beside them."""

from __future__ import annotations

from typing import Any

from cells import read, rows, source

SERVED_SHARES = (0.95, 0.99)
PLAN, DEATH, ROUTING, ROUTING_8, THOUSAND = (
    f"simulated-cluster-{part}-h200" for part in ("plan", "death", "routing", "routing-8", "thousand")
)


def capacity() -> str:
    """Requests/s that clusters of several sizes take, all replicas up and one of them dead."""
    plan, death = read(PLAN)["runs"], read(DEATH)["runs"]
    lines = []
    for size in sorted({run["replicas"] for run in plan}):
        whole = [_holds(plan, size, share) for share in SERVED_SHARES]
        rest = [_holds(death, size, share) for share in SERVED_SHARES] if size > 1 else [None, None]
        each = [f"{value:.0f}" if value else "–" for value in (*whole, *rest)]
        lines.append([str(size), *each, f"{whole[0] / size:.1f}" if whole[0] else "–"])
    header = ["replicas"]
    header += [f"{share:.0%} in both targets" for share in SERVED_SHARES]
    header += [f"one dead: {share:.0%}" for share in SERVED_SHARES]
    return rows([*header, "for each, 95%"], lines) + source(PLAN, DEATH)


def _holds(runs: list[dict[str, Any]], size: int, share: float) -> float | None:
    """The highest rate at which so many requests meet both targets; straight between the rates that were run."""
    own = sorted((run["rate"], run["figures"]["attainment"]) for run in runs if run["replicas"] == size)
    best = None
    for (low, more), (high, less) in zip(own, own[1:], strict=False):
        if more >= share > less:
            best = low + (high - low) * (more - share) / (more - less)
    return own[-1][0] if own and own[-1][1] >= share else best


def needed() -> str:
    """Replicas for a rate, without and with one that may die, from the largest cluster no larger than them."""
    plan, death = read(PLAN)["runs"], read(DEATH)["runs"]
    sizes = sorted({run["replicas"] for run in plan})

    def count(rate: float, runs: list[dict[str, Any]], least: int) -> str:
        for number in range(least, 10_000):
            known = max(size for size in sizes if size <= number)
            found = _holds(runs, known, SERVED_SHARES[0])
            lost = known / (known - 1) * (number - 1) / number if runs is death else 1.0
            if found is not None and found / known * lost * number >= rate:
                return str(number)
        return "–"

    lines = [[f"{rate:,}", count(rate, plan, 1), count(rate, death, 2)] for rate in (10, 20, 50, 100, 200, 500, 1000)]
    return rows(["requests/s", "replicas", "one of which may die"], lines) + source(PLAN, DEATH)


def routings() -> str:
    """What each routing finds in caches, and what that is worth."""
    lines = []
    for name in (ROUTING, ROUTING_8):
        for run in read(name)["runs"]:
            own = run["figures"]
            tails = f"{own['ttft_ms_p50']:.0f} / {own['ttft_ms_p95']:.0f}"
            place = [str(run["replicas"]), str(run["ingress_replicas"]), run["routing"]]
            lines.append(
                [*place, f"{own['cached']:.0%}", tails, f"{own['tpot_ms_p95']:.1f}", f"{own['attainment']:.1%}"]
            )
    header = ["replicas", "ingresses", "routing", "of prompts found read", "TTFT p50 / p95, ms", "TPOT p95, ms"]
    return rows([*header, "in both targets"], lines) + source(ROUTING, ROUTING_8)


def thousand() -> str:
    """A thousand replicas, some of which die."""
    lines = []
    for run in read(THOUSAND)["runs"]:
        own = run["figures"]
        figures = [f"{run['replicas']:,}", f"{run['rate']:,.0f}", f"{own['requests']:,}", str(own["deaths"])]
        figures += [str(own["moved"]), f"{own['pause_ms_p50']:.0f} / {own['pause_ms_p95']:.0f}", str(own["lost"])]
        lines.append([*figures, f"{own['attainment']:.1%}", f"{run['simulated_in_s']:.0f} s"])
    header = ["replicas", "requests/s", "requests", "deaths", "streams moved", "pause p50 / p95, ms", "lost"]
    return rows([*header, "in both targets", "simulated in"], lines) + source(THOUSAND)


def beside_ray() -> str:
    """Ray's two replicas and the simulated ones, on the same requests."""
    lines = []
    for run in read("cluster_simulated")["runs"]:
        for name, title in (
            ("tok_s", "tokens/s"), ("ttft_ms_mean", "TTFT mean, ms"), ("ttft_ms_p95", "TTFT p95, ms"),
            ("e2e_ms_mean", "stream mean, ms"), ("e2e_ms_p95", "stream p95, ms"),
        ):  # fmt: skip
            both = [f"{run[part][name]:,.0f}" for part in ("measured", "simulated")]
            lines.append([f"{run['load']:.0%}", title, *both, f"{run['ratios'][name]:.2f}"])
    return rows(["load", "", "Ray", "simulated", "ratio"], lines) + source("cluster_simulated")
