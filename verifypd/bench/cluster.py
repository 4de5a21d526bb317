"""Simulated clusters: traffic whose prompts begin alike, the pace of a replica, a run, and its figures.

Knows what a cluster is made of; nothing of Ray.
"""

from __future__ import annotations

import gc
import json
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from itertools import accumulate, islice
from typing import Any

import numpy as np

from verifypd.bench import svg
from verifypd.bench.charts import Chart, Series
from verifypd.bench.page import COLOUR_RULES, STYLE
from verifypd.bench.simulated import NOISE
from verifypd.bench.workload import mixed_lengths
from verifypd.cluster.config import ClusterConfig
from verifypd.cluster.simulated import Cluster, Result
from verifypd.cluster.simulated_replica import Asked, Beginning, World
from verifypd.control.architectures import Architecture
from verifypd.control.cost import Coefficients
from verifypd.errors import ConfigError
from verifypd.simulate.engine import Simulation
from verifypd.simulate.pace import Pace, Watch
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import Settings, TrueCosts

WARM = 0.2  # share of the time whose requests are not counted: caches fill, and nobody waits yet
PHASES, EACH = 10, 160  # of the traffic that a pace is learnt from: each has a higher rate than the one before
MORE = 1.6  # times as high
QUICK_EACH = 15
ALONE = 8  # requests that are run by themselves first
SKEW = 0.8  # the k-th beginning is asked for 1 / k ** SKEW as often as the first
SHARES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Poisson arrivals of mixed lengths, of which some begin with one of a number of long texts."""

    rate: float  # requests/s
    seconds: float
    shared: float = 0.0  # share of the requests that begin with one of these texts
    texts: int = 1000
    text_tokens: int = 1000
    surge: float = 1.0  # the rate in the middle third is so many times as high
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("rate", 1e-6), ("seconds", 1e-3), ("texts", 1), ("text_tokens", 1), ("surge", 1e-6)):
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name.replace('_', ' ')} {getattr(self, name)!r} must be above 0")
        if not 0.0 <= self.shared <= 1.0:
            raise ConfigError(f"the share of prompts that begin alike, {self.shared!r}, must lie in 0..1")

    def requests(self) -> Iterator[Asked]:
        """In the order in which they come."""
        noise = random.Random(f"cluster/{self.seed}")
        weights = list(accumulate(1 / (k + 1) ** SKEW for k in range(self.texts)))
        names = [k.to_bytes(8) for k in range(self.texts)]
        at = 0.0
        while True:
            middle = self.seconds / 3 <= at < 2 * self.seconds / 3
            at += noise.expovariate(self.rate * (self.surge if middle else 1.0))
            if at > self.seconds:
                return
            prompt, output = mixed_lengths(noise)
            if noise.random() < self.shared:
                name = names[bisect(weights, noise.random() * weights[-1])]
                yield Asked(at, self.text_tokens + prompt, output, (Beginning(name, self.text_tokens),))
            else:
                yield Asked(at, prompt, output)


def learn(
    make: Callable[[], tuple[Architecture, Settings]],
    costs: Coefficients,
    alpha: float,
    traffic: Traffic,
    each_phase: int = EACH,
) -> Pace:
    """The pace of one engine, from its twin under traffic of these lengths: from hardly any to more than it takes.

    Half of the texts that prompts share are found read.
    """
    count = PHASES * each_phase
    lengths = list(islice(replace(traffic, rate=1.0, seconds=math.inf, surge=1.0, seed=-1).requests(), count))
    true, watch = TrueCosts(costs, noise=NOISE), Watch()

    def run(requests: Sequence[Asked]) -> float:
        drawn = replay([(each.at, each.prompt, each.output) for each in requests], alpha, seed=-1)
        found = [each.beginnings[-1].tokens if each.beginnings and i % 2 else 0 for i, each in enumerate(requests)]
        arrivals = [replace(each, cached=cached) for each, cached in zip(drawn, found, strict=True)]
        architecture, settings = make()
        return Simulation(architecture, arrivals, true, settings, on_step=watch.see).run().seconds

    alone = sum(run([replace(each, at=0.0)]) for each in lengths[:ALONE]) / ALONE
    noise, at, spread = random.Random("pace"), 0.0, []
    for place, each in enumerate(lengths):
        at += noise.expovariate(0.5 * MORE ** (place // each_phase) / alone)
        spread.append(replace(each, at=at))
    run(spread)
    return watch.pace(make()[1])


def play(config: ClusterConfig, world: World, traffic: Traffic) -> Result:
    """One run. Streams are many and make no circles, so nobody looks for any."""
    gc.disable()
    try:
        return Cluster(config, world).play(traffic.requests())
    finally:
        gc.enable()


def figures(result: Result, world: World, traffic: Traffic) -> dict[str, Any]:
    """Of the requests that came after the caches had filled; times in ms."""
    begun = WARM * traffic.seconds
    counted = [each for each in result.streams if each.asked.at >= begun]
    ended = [each for each in counted if each.ended is not None]
    moved = [each for each in counted if each.moves]
    found: dict[str, Any] = {"requests": len(counted), "lost": sum(each.lost for each in counted)}
    series = {
        "ttft": [each.first - each.asked.at for each in ended if each.first is not None],
        "tpot": [each.tpot for each in ended if each.asked.output > 1],
        "e2e": [each.ended - each.asked.at for each in ended if each.ended is not None],
        "pause": [each.pause for each in moved],
    }
    for name, values in series.items():
        found |= {f"{name}_ms_p{q}": round(1e3 * float(np.percentile(values or [0.0], q)), 2) for q in SHARES}
        found[f"{name}_ms_mean"] = round(1e3 * float(np.mean(values or [0.0])), 2)
    window = traffic.seconds - begun
    last = max((each.ended or 0.0 for each in ended), default=0.0)
    met = sum(each.met(world) for each in counted)
    asked = sum(each.asked.prompt for each in counted)
    sizes = [*result.sizes, (result.seconds, 0)]
    busy = sum(number * (after[0] - at) for (at, number), after in zip(sizes, sizes[1:], strict=False))
    return found | {
        "tok_s": round(sum(each.asked.output for each in ended) / max(window, last - begun), 1),
        "goodput": round(met / window, 3),
        "attainment": round(met / max(1, len(counted)), 4),
        "cached": round(sum(each.cached for each in counted) / max(1, asked), 4),
        "moved": len(moved),
        "deaths": result.deaths,
        "replicas_mean": round(busy / result.seconds, 2) if result.seconds else 0.0,
        "replicas_most": max((number for _, number in result.sizes), default=0),
        "seconds": round(result.seconds, 2),
        "steps": result.steps,
    }


def described(world: World) -> dict[str, Any]:
    """A world as plain data: its table of steps comes apart."""
    plain = {each.name: getattr(world, each.name) for each in fields(world) if each.name != "pace"}
    return {name: None if value == math.inf else value for name, value in plain.items()} | {"slots": world.pace.slots}


def table(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each run, under a header."""
    header = ["replicas", "ingress", "routing", "requests/s", "deaths", "seed", "in both targets", "TTFT p50 / p95, ms",
              "TPOT p50 / p95, ms", "tokens/s", "found read", "moved", "pause p95, ms", "lost"]  # fmt: skip
    lines = [header]
    for run in runs:
        own = run["figures"]
        size = str(run["replicas"])
        if run["max_replicas"]:
            size += f"–{run['max_replicas']} ({own['replicas_mean']:.1f})"
        lines.append(
            [size, str(run["ingress_replicas"]), run["routing"], f"{run['rate']:g}", str(own["deaths"]),
             str(run["seed"]), f"{100 * own['attainment']:.1f} %",
             f"{own['ttft_ms_p50']:.0f} / {own['ttft_ms_p95']:.0f}",
             f"{own['tpot_ms_p50']:.1f} / {own['tpot_ms_p95']:.1f}", f"{own['tok_s']:,.0f}",
             f"{100 * own['cached']:.0f} %", str(own["moved"]), f"{own['pause_ms_p95']:.0f}" if own["moved"] else "",
             str(own["lost"])]
        )  # fmt: skip
    return lines


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table of a page."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]]) + "\n"


def charts(found: dict[str, Any]) -> list[Chart]:
    """What the runs came to by rate, and how many replicas there were where that changed."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        lines.setdefault(f"{run['replicas']} replicas, {run['routing']}", []).append(run)
    made = []
    for figure, title, y in (
        ("attainment", "Requests within both targets", "share"),
        ("ttft_ms_p95", "TTFT, p95", "ms"),
        ("tpot_ms_p95", "TPOT, p95", "ms"),
    ):
        series = []
        for name, runs in lines.items():
            ordered = sorted(runs, key=lambda run: float(run["rate"]))
            xs = tuple(run["rate"] / run["replicas"] for run in ordered)
            series.append(Series(name, xs, tuple(run["figures"][figure] for run in ordered)))
        made.append(Chart(figure, title, "requests/s for each replica", y, tuple(series)))
    sized = []
    for run in found["runs"]:
        if len(run["sizes"]) > 1:
            name = f"{run['rate']:g}/s, {run['routing']}"
            times, numbers = zip(*run["sizes"], strict=True)
            sized.append(Series(name, times, numbers))
    return [*made, Chart("sizes", "Replicas", "s", "up", tuple(sized), kind="steps")] if sized else made


def page(found: dict[str, Any]) -> str:
    """The runs as one HTML file."""
    note = found["note"]
    drawn = "".join(svg.draw(replace(each, title=f"{each.title} [{note}]")) for each in charts(found))
    lines = table(found["runs"])
    head = "".join(f"<th>{escape(each)}</th>" for each in lines[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in line) + "</tr>" for line in lines[1:])
    facts = {name: value for name, value in found.items() if name not in ("runs", "pace")}
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Simulated cluster</title><style>{STYLE}{COLOUR_RULES}</style></head><body>"
        f"<h1>Simulated cluster</h1><p class='banner'>{escape(note)}</p><div class='grid2'>{drawn}</div>"
        f"<h2>Figures</h2><div class='scroll'><table class='dense'><tr>{head}</tr>{body}</table></div>"
        f"<h2>Where the figures come from</h2><pre>{escape(json.dumps(facts, indent=1, ensure_ascii=False))}</pre>"
        "</body></html>\n"
    )
