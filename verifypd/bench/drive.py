"""Drives one engine in this process, closed loop or by arrivals, and says how it went in the project's own metrics.

Knows requests and clocks; nothing of models. Definitions: throughput counts all tokens emitted in the window; a gap is
the time between two outputs of one request; a request that was stopped counts as unfinished.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verifypd.bench.figures import Outcome, Record
from verifypd.bench.steps import Steps
from verifypd.bench.workload import Arrival, prompts
from verifypd.engine.engine import Engine
from verifypd.metrics.stats import percentile
from verifypd.request import Request, SamplingParams

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_orders = itertools.count(1)


@dataclass(slots=True)
class Sent:
    """A request and when its outputs came, s of the engine's clock."""

    request: Request
    outputs: list[float] = field(default_factory=list)
    seen: int = 0
    at: float = 0.0  # when it was handed to the engine, which may be later than its arrival
    first: int = 0  # tokens of the first output

    @property
    def ttft(self) -> float:
        """s; until the first output."""
        return self.outputs[0] - self.request.metrics.arrival_time

    @property
    def tpot(self) -> float:
        """s; of the tokens after the first output's."""
        return (self.outputs[-1] - self.outputs[0]) / max(1, self.request.output_len - 1)

    @property
    def gaps(self) -> list[float]:
        """s; between outputs."""
        return [later - earlier for earlier, later in itertools.pairwise(self.outputs)]


class Drive:
    """One engine and what is sent to it."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.seed = seed
        self.last: Run | None = None  # the run that ended last, for those who want its single times

    def closed(self, concurrency: int, requests: int, prompt: int, output: int, cap: float = 60.0) -> dict[str, Any]:
        """As many clients as `concurrency`; each sends its next request when its last one has ended."""
        ids = iter(prompts([prompt] * requests, self.engine.sampling.vocab, self.seed))
        run = Run(self.engine)
        waiting = requests
        while (waiting or run.active) and run.elapsed < cap:
            run.collect()
            while waiting and len(run.active) < concurrency:
                run.send(next(ids), output, self.engine.clock())
                waiting -= 1
            run.step()
        self.last = run
        return run.end(requests)

    def steady(self, concurrency: int, prompt: int, output: int) -> Run:
        """Requests that have begun to decode and are kept running by the caller's own steps."""
        run = Run(self.engine)
        for ids in prompts([prompt] * concurrency, self.engine.sampling.vocab, self.seed):
            run.send(ids, output, self.engine.clock())
        while any(not sent.outputs for sent in run.sent.values()):
            run.step()
        return run

    def arriving(self, arrivals: Sequence[Arrival], beside: int = 0, cap: float = 120.0) -> dict[str, Any]:
        """Requests as they arrive, in real time; `beside` more run all along and are counted apart."""
        longest = self.engine.max_model_len
        ids = prompts([a.prompt_tokens for a in arrivals], self.engine.sampling.vocab, self.seed)
        run, background = Run(self.engine), Run(self.engine)
        background.steps = run.steps
        for tokens in prompts([64] * beside, self.engine.sampling.vocab, self.seed + 1):
            background.send(tokens, longest - 65, self.engine.clock())
        todo = list(zip(arrivals, ids, strict=True))[::-1]
        while (todo or run.active) and run.elapsed < cap:
            background.note(run.collect())
            while todo and todo[-1][0].at <= run.elapsed:
                arrival, tokens = todo.pop()
                output = min(arrival.output_tokens, longest - len(tokens) - 1)
                run.send(tokens, output, run.began + arrival.at)
            if run.active or background.active:
                background.note(run.step())
            elif todo:
                time.sleep(min(0.001, max(0.0, todo[-1][0].at - run.elapsed)))
        beside_figures = background.figures(beside) if beside else {}
        background.stop()
        self.last = run
        return {**run.end(len(arrivals)), **{f"beside_{name}": value for name, value in beside_figures.items()}}


class Run:
    """What was sent since the start of a run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.began = engine.clock()
        self.sent: dict[int, Sent] = {}
        self.active: set[int] = set()
        self.steps = Steps(engine)
        self._paused, self._taken = engine.pauses, engine.memory_taken
        stats = engine.stats
        self._before = (stats.drafted, stats.accepted, sum(lane.seconds for lane in stats.lanes.values()))

    def pauses(self) -> dict[str, float]:
        """What was compiled, captured and collected meanwhile, and how often memory was got from the driver."""
        taken = {name: count - self._taken[name] for name, count in self.engine.memory_taken.items()}
        return self.engine.pauses.since(self._paused).summary() | taken

    @property
    def elapsed(self) -> float:
        """s since it began."""
        return self.engine.clock() - self.began

    def send(self, ids: list[int], output: int, arrival: float) -> None:
        """A request of `output` tokens, counted from `arrival`."""
        order = next(_orders)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        request = Request(
            str(order), ids, params, seed=order, max_length=len(ids) + output, arrival=arrival, order=order
        )
        self.engine.add(request)
        self.sent[order] = Sent(request, at=self.engine.clock())
        self.active.add(order)

    def collect(self) -> list[Request]:
        """What the device has brought is noted, before anything is sent."""
        self.steps.collecting()
        changed = self.engine.collect()
        self.note(changed)
        return changed

    def step(self) -> list[Request]:
        """One step of the engine; what it brought is noted."""
        planned = self.steps.stepping()
        changed = self.engine.step()
        self.steps.stepped(planned)
        self.note(changed)
        return changed

    def note(self, changed: list[Request]) -> None:
        """Keep when outputs came."""
        now = self.engine.clock()
        for request in changed:
            sent = self.sent.get(request.order)
            if sent is None:
                continue
            if request.output_len > sent.seen:
                sent.first = sent.first or request.output_len
                sent.seen = request.output_len
                if sent.outputs:
                    self.steps.gap(sent.outputs[-1], now)
                sent.outputs.append(now)
            if request.finished:
                self.active.discard(request.order)

    def stop(self) -> None:
        """End what still runs."""
        for order in self.active:
            self.engine.finish(self.sent[order].request)
        self.engine.drain()

    def end(self, wanted: int) -> dict[str, Any]:
        """The figures; then nothing runs any more."""
        figures = self.figures(wanted)
        self.stop()
        self.engine.check()
        return figures

    def outcome(self, wanted: int) -> Outcome:
        """The single times, from the start of the run. Requests that were stopped count as unfinished."""
        records = tuple(
            Record(
                due=sent.request.metrics.arrival_time - self.began,
                sent=sent.at - self.began,
                outputs=tuple(at - self.began for at in sent.outputs),
                tokens=sent.seen,
                first=sent.first,
                finished=sent.request.finish_reason == "length",
            )
            for sent in self.sent.values()
        )
        whole = len(records) == wanted and all(record.finished for record in records)
        over = max((record.outputs[-1] for record in records), default=0.0) if whole else self.elapsed
        return Outcome(records, wanted, over)

    def figures(self, wanted: int) -> dict[str, Any]:
        """ms where it is a time."""
        seconds = self.elapsed
        ended = [s for s in self.sent.values() if s.request.finished and s.outputs]
        started = [s for s in self.sent.values() if s.outputs]
        config, stats = self.engine.config, self.engine.stats
        drafted, accepted, busy = (
            now - then
            for now, then in zip(
                (stats.drafted, stats.accepted, sum(lane.seconds for lane in stats.lanes.values())),
                self._before,
                strict=True,
            )
        )
        good = sum(1e3 * s.ttft <= config.slo_ttft and 1e3 * s.tpot <= config.slo_tpot for s in ended)
        times = {
            "ttft_ms": [s.ttft for s in started],
            "tpot_ms": [s.tpot for s in (ended or started)],
            "gap_ms": [gap for s in started for gap in s.gaps],
        }
        result: dict[str, Any] = {
            f"{name}_{share}": 1e3 * percentile(values, part)
            for name, values in times.items()
            for share, part in SHARES.items()
        }
        return result | {
            "gap_ms_max": 1e3 * max(times["gap_ms"], default=0.0),
            "tok_s": sum(s.request.output_len for s in self.sent.values()) / seconds,
            "goodput": good / seconds,
            "seconds": seconds,
            "requests": wanted,
            "unfinished": wanted - len(ended),
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "idle_fraction": max(0.0, 1.0 - busy / seconds),
            "e2e_s": [s.outputs[-1] - s.request.metrics.arrival_time for s in ended],
            "pauses": self.pauses(),
            "longest_gap": self.steps.summary(),
        }
