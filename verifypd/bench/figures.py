"""From the times of requests to figures: one function for every engine, runs pooled, requests drawn again.

Knows times and counts; nothing of engines. Definitions: TTFT is the first output less the time the request was due;
TPOT is (last - first) / (tokens - 1); a gap is the time between two outputs of one request; throughput counts all
tokens of the window; goodput is requests per second that ended and met both targets. A request that was stopped counts
with the time it had taken until then. One that failed has no times: it is counted, and shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SLO_TTFT, SLO_TPOT = 0.5, 0.015  # s
ROUNDS = 200  # of the bootstrap
BIN = 0.01  # width of a gap's bin in an interval, as a share
LEAST, MOST = 1e-5, 1e2  # s; gaps outside are counted with these
TICK = 1e-6  # s; times travel as whole numbers of it


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good request keeps to, s."""

    ttft: float = SLO_TTFT
    tpot: float = SLO_TPOT


TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class Record:
    """One request: when it was due and sent, and when its outputs came, s from the start of the run."""

    due: float
    sent: float
    outputs: tuple[float, ...]
    tokens: int
    first: int  # tokens of the first output
    finished: bool
    stopped: float | None = None  # s; when it alone was stopped, for taking too long
    error: str = ""  # what went wrong; it was refused, or its stream broke
    prompt_tokens: int = 0  # as the engine counted them; 0: it did not say

    @property
    def tpot(self) -> float:
        """s a token after the first; not a number where there is none."""
        if self.tokens < 2 or not self.outputs:
            return math.nan
        return (self.outputs[-1] - self.outputs[0]) / (self.tokens - 1)

    def packed(self) -> list[Any]:
        """Whole microseconds; outputs as differences."""
        ticks = [round(at / TICK) for at in (self.due, self.sent, *self.outputs)]
        gaps = [after - before for before, after in zip([0, *ticks[2:]], ticks[2:], strict=False)]
        packed = [ticks[0], ticks[1], self.tokens, self.first, int(self.finished), gaps]
        rest = [None if self.stopped is None else round(self.stopped / TICK), self.error, self.prompt_tokens]
        return packed + rest if any(rest) else packed

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> Self:
        """What `packed` made."""
        due, sent, tokens, first, finished, gaps, *rest = packed
        stopped, error, prompt = rest or (None, "", 0)
        at, outputs = 0, []
        for gap in gaps:
            at += gap
            outputs.append(at * TICK)
        stopped = None if stopped is None else stopped * TICK
        return cls(due * TICK, sent * TICK, tuple(outputs), tokens, first, bool(finished), stopped, error, prompt)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its requests in the order they were due, how many were asked for, and how long it took."""

    records: tuple[Record, ...]
    wanted: int
    seconds: float  # from the start to the last output, or to the stop

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        return {"wanted": self.wanted, "seconds": self.seconds, "requests": [each.packed() for each in self.records]}

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> Self:
        """What `packed` made."""
        records = tuple(Record.unpacked(each) for each in data["requests"])
        return cls(records, data["wanted"], data["seconds"])


def cut(outcome: Outcome, seconds: float) -> Outcome:
    """The run as it would have been, had it been stopped then. Tokens are spread evenly over a request's outputs."""
    records = []
    for record in outcome.records:
        outputs = tuple(at for at in record.outputs if at <= seconds)
        whole = len(outputs) == len(record.outputs)
        tokens = record.tokens if whole else record.tokens * len(outputs) // len(record.outputs)
        if record.sent <= seconds:
            records.append(replace(record, outputs=outputs, tokens=tokens, finished=record.finished and whole))
    return Outcome(tuple(records), outcome.wanted, min(seconds, outcome.seconds))


class Pool:
    """The requests of some runs, column by column."""

    def __init__(self, outcomes: Sequence[Outcome], targets: Targets = TARGETS) -> None:
        """`targets`: what a good request keeps to."""
        kept = [[record for record in outcome.records if not record.error] for outcome in outcomes]
        pairs = [(record, outcome) for outcome, own in zip(outcomes, kept, strict=True) for record in own]
        self.sizes = [len(own) for own in kept]
        self.targets = targets
        self.failed = sum(len(outcome.records) for outcome in outcomes) - len(pairs)
        self.wanted = sum(outcome.wanted for outcome in outcomes)
        self.seconds = sum(outcome.seconds for outcome in outcomes)
        self.tokens = sum(record.tokens for record, _ in pairs)
        self.finished = np.array([record.finished for record, _ in pairs], dtype=bool)
        self.late = np.array([record.sent - record.due for record, _ in pairs])
        ends = [outcome.seconds if record.stopped is None else record.stopped for record, outcome in pairs]
        both = list(zip((record for record, _ in pairs), ends, strict=True))
        self.ttft = np.array([(r.outputs[0] if r.outputs else end) - r.due for r, end in both])
        self.e2e = np.array([(r.outputs[-1] if r.finished and r.outputs else end) - r.due for r, end in both])
        self.tpot = np.array([record.tpot for record, _ in pairs])
        self.gaps = [np.diff(np.array(record.outputs)) for record, _ in pairs]
        self.firsts = sum(record.first for record, _ in pairs)
        self.prompt_tokens = sum(record.prompt_tokens for record, _ in pairs)
        self.finished_tokens = sum(record.tokens for record, _ in pairs if record.finished)
        self.good = self.finished & (self.ttft <= targets.ttft) & ~(self.tpot > targets.tpot)

    def times(self) -> dict[str, Floats]:
        """Single times by name, s."""
        gaps = np.concatenate(self.gaps) if self.gaps else np.zeros(0)
        return {"ttft": self.ttft, "tpot": self.tpot[~np.isnan(self.tpot)], "gap": gaps, "e2e": self.e2e}

    def figures(self) -> dict[str, Any]:
        """ms where it is a time."""
        times = self.times()
        gaps = times["gap"]
        result: dict[str, Any] = {
            f"{name}_ms_{share}": 1e3 * ranked(np.sort(values), part)
            for name, values in times.items()
            for share, part in SHARES.items()
        }
        result |= {
            f"{name}_ms_mean": 1e3 * float(values.mean()) if len(values) else 0.0 for name, values in times.items()
        }
        seconds = max(self.seconds, TICK)
        return result | {
            "gap_ms_max": 1e3 * float(gaps.max(initial=0.0)),
            "gaps_late": float(np.mean(gaps > self.targets.tpot)) if len(gaps) else 0.0,
            "tok_s": self.tokens / seconds,
            "tok_s_original": self.finished_tokens / seconds,  # the original's: tokens of finished requests alone
            "goodput": float(self.good.sum()) / seconds,
            "good_share": float(self.good.sum()) / max(1, self.wanted),
            "tokens_per_output": (self.tokens - self.firsts) / max(1, len(gaps)),
            "sent_late_ms_p95": 1e3 * ranked(np.sort(self.late), 0.95),
            "seconds": self.seconds,
            "requests": self.wanted,
            "unfinished": self.wanted - int(self.finished.sum()) - self.failed,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.tokens,
        }


def ranked(ordered: Floats, share: float) -> float:
    """The value below which `share` of the ordered values lie, by nearest rank; 0 without any."""
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) if len(ordered) else 0.0


def figures(outcomes: Sequence[Outcome], targets: Targets = TARGETS) -> dict[str, Any]:
    """The figures of some runs taken as one."""
    return Pool(outcomes, targets).figures()


# -- draws --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of some runs, and each again for requests drawn from them, up to a factor: [1 + ROUNDS].

    The first is of the requests themselves. Runs of the same sizes have the same draws, so that arms that served the
    same requests are drawn together.
    """

    figures: dict[str, Any]
    draws: dict[str, Floats]


def sample(outcomes: Sequence[Outcome], targets: Targets = TARGETS, salt: int = 0) -> Sample:
    """Draw requests with replacement, each run's from its own. salt: gives other draws."""
    pool = Pool(outcomes, targets)
    if not len(pool.ttft):
        return Sample(pool.figures(), {})
    noise = np.random.default_rng([*pool.sizes, salt] if salt else pool.sizes)
    starts = np.cumsum([0, *pool.sizes[:-1]])
    parts = [start + noise.integers(0, size, (ROUNDS, size)) for start, size in zip(starts, pool.sizes, strict=True)]
    drawn = np.concatenate([np.arange(len(pool.ttft))[None], np.concatenate(parts, axis=1)])
    draws = {
        # a closed loop always has as many requests: its throughput goes with one over the time of each
        "tok_s": 1.0 / np.maximum(pool.e2e[drawn].mean(axis=1), TICK),
        "good_share": np.maximum(pool.good[drawn].sum(axis=1), 0.5) / max(1, pool.wanted),  # of those that failed too
        "e2e_ms_mean": pool.e2e[drawn].mean(axis=1),
        **_ranks("e2e_ms", pool.e2e[drawn]),
        **_ranks("ttft_ms", pool.ttft[drawn]),
        **_ranks("tpot_ms", pool.tpot[drawn]),
        **_gap_ranks(pool.gaps, drawn),
    }
    return Sample(pool.figures(), draws)


def _ranks(name: str, values: Floats) -> dict[str, Floats]:
    """Percentiles of each row; what is not a number does not count."""
    ordered = np.sort(values, axis=1)  # those go last
    counts = (~np.isnan(ordered)).sum(axis=1)
    rows = np.arange(len(ordered))
    return {
        f"{name}_{share}": ordered[rows, np.maximum(0, np.ceil(SHARES[share] * counts).astype(np.int64) - 1)]
        for share in ("p50", "p95")
    }


def _gap_ranks(gaps: list[Floats], drawn: NDArray[np.int64]) -> dict[str, Floats]:
    """Percentiles of the gaps of the requests in each row: the first row's are exact, the others differ from it by
    whole bins. A bin is wider than seeds of steady gaps differ by."""
    edges = np.arange(math.log(LEAST), math.log(MOST), BIN)
    bins = np.zeros((len(gaps), len(edges)), dtype=np.float32)
    for row, each in zip(bins, gaps, strict=True):
        places = np.searchsorted(edges, np.log(np.clip(each, LEAST, MOST)))
        np.add.at(row, np.minimum(places, len(edges) - 1), 1.0)
    rows, width = drawn.shape
    times = np.bincount((drawn + width * np.arange(rows)[:, None]).ravel(), minlength=rows * width)
    counts = np.cumsum(times.reshape(rows, width).astype(np.float32) @ bins, axis=1)
    found, every = {}, np.sort(np.concatenate(gaps))
    for share in ("p50", "p99"):
        places = (counts < SHARES[share] * counts[:, -1:]).sum(axis=1)
        logs = edges[np.minimum(places, len(edges) - 1)]
        found[f"gap_ms_{share}"] = ranked(every, SHARES[share]) * np.exp(logs - logs[0])
    return found
