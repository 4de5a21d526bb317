"""A `--record` folder as frames of the dashboard: what a page watching that run would have been told, and when.

Counters have the names of /metrics. A record knows slots, plans and verdicts: when a request arrived, who waited and
what the memory held is not in it, so times count from when a prompt was first read. Reads files only.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from verifypd import __version__
from verifypd.engine import trace
from verifypd.errors import RequestError
from verifypd.server.totals import GAP_BUCKETS, Spread

SHORTEST, LONGEST = 0.05, 0.5  # s between two frames
STEPS, CHANGES = 48, 12  # that a frame shows, as the server's do
FEWEST, MOST = 100, 2000  # frames of a record: a short one has finer frames, a long one coarser
LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "gap": "verifypd:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}


@dataclass(slots=True)
class Seen:
    """A request in its slot, as the record shows it."""

    order: int
    begun: float  # s, when its prompt was first read
    lane: int = 0
    tokens: int = 0
    context: int = 0
    entered: float = 0.0
    first: float | None = None
    last: float = 0.0


class Books:
    """What has been counted up to a moment of the record."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.spreads = {name: Spread(GAP_BUCKETS) for name in LATENCIES}
        self.slots: dict[int, Seen] = {}
        self.steps: deque[list[Any]] = deque(maxlen=STEPS)
        self.changes: deque[list[Any]] = deque(maxlen=CHANGES)
        self.carried: set[int] = set()
        self.beliefs: dict[str, Any] = {}
        self.policy = self.architecture = ""
        self._orders = 0
        self._ended: float | None = None  # s, when the batches of the last step had run

    def take(self, line: dict[str, Any], at: float) -> None:
        """Count one line of the record."""
        event = line.get("event")
        if event == "plan":
            self._plan(line, at)
        elif event == "verdicts":
            self.counts["verifypd:verifier_passes_total"] += 1
            for verdict in line["verdicts"]:
                self._verdict(verdict, at)
        elif event == "decision":
            change = (line.get("previous", ""), line.get("architecture", ""), line.get("reason", ""))
            self.changes.append([at, *change])
            self.counts["verifypd:architecture_switches_total"] += 1
        elif event == "policy":
            self.beliefs = {name: value for name, value in line.items() if name not in ("event", "step", "time")}

    def _plan(self, line: dict[str, Any], at: float) -> None:
        draft, verify, prefill = (line.get(name) or [] for name in ("draft", "verify", "prefill"))
        chunks = [span for span in (*verify, *prefill) if span.get("start") is not None]
        decoding = [span for span in verify if span.get("start") is None]
        drafting = [span for span in draft if span["drafts"]]
        self.policy, self.architecture = str(line.get("policy", "")), str(line.get("arch", ""))
        if self.architecture:
            self.counts[f'verifypd:architecture_steps_total{{architecture="{self.architecture}"}}'] += 1
        self.counts["vllm:prompt_tokens_total"] += sum(span["rows"] for span in chunks)
        self.carried = set()
        for lane, spans in ((1, drafting), (2, decoding), (0, chunks)):
            for span in spans:
                self._carry(span, lane, at)
        seconds = [line.get(name, 0.0) for name in ("prefill_seconds", "draft_seconds", "verify_seconds")]
        if self.steps and self._ended is not None:
            self.steps[-1][5] = round(1e6 * max(0.0, at - self._ended))  # the rest of the step before
        longest = max((span["drafts"] for span in drafting), default=0)
        sizes = [len(drafting), longest, len(decoding), sum(span["rows"] for span in chunks)]
        micros = [round(1e6 * each) for each in seconds]
        self.steps.append([line["step"], self.architecture, *micros, 0, *sizes])
        self._ended = at + sum(seconds)

    def _carry(self, span: dict[str, Any], lane: int, at: float) -> None:
        seen = self.slots.get(span["slot"])
        if seen is None:
            self._orders += 1
            seen = self.slots[span["slot"]] = Seen(self._orders, at, entered=at)
        if seen.lane != lane:
            seen.lane, seen.entered = lane, at
        seen.context = max(seen.context, span.get("context", 0))
        self.carried.add(span["slot"])

    def _verdict(self, verdict: dict[str, Any], at: float) -> None:
        seen = self.slots.get(verdict["slot"])
        drafted, accepted, tokens = verdict["drafted"], verdict["accepted"], verdict["tokens"]
        self.counts["vllm:generation_tokens_total"] += tokens
        if seen is not None and tokens:
            self._arrived(seen, tokens, at)
        if drafted:
            self._drafts(drafted, accepted, seen.context if seen else 1)
        if verdict.get("finish"):
            self._finished(verdict, seen, at)

    def _arrived(self, seen: Seen, tokens: int, at: float) -> None:
        if seen.first is None:
            seen.first = at
            self.spreads["ttft"].add(at - seen.begun)
        else:
            self.spreads["gap"].add(at - seen.last)
            self.counts["verifypd:verdicts_total"] += 1
            self.counts["verifypd:verdict_tokens_total"] += tokens
        seen.last = at
        seen.tokens += tokens
        seen.lane, seen.entered = 1, at

    def _drafts(self, drafted: int, accepted: int, context: int) -> None:
        size = 1 << max(0, context - 1).bit_length()
        self.counts["vllm:spec_decode_num_drafts_total"] += 1
        self.counts["vllm:spec_decode_num_draft_tokens_total"] += drafted
        self.counts["vllm:spec_decode_num_accepted_tokens_total"] += accepted
        self.counts[f'verifypd:draft_tokens_by_context_total{{context="{size}"}}'] += drafted
        self.counts[f'verifypd:accepted_tokens_by_context_total{{context="{size}"}}'] += accepted
        for position in range(drafted):
            label = f'{{position="{position}"}}'
            self.counts[f"verifypd:draft_tokens_per_pos_total{label}"] += 1
            self.counts[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{label}"] += position < accepted

    def _finished(self, verdict: dict[str, Any], seen: Seen | None, at: float) -> None:
        outcome = "error" if verdict["finish"] == "error" else "ok"
        self.counts[f'verifypd:calls_total{{outcome="{outcome}"}}'] += 1
        if seen is not None:
            self.spreads["e2e"].add(at - seen.begun)
            if seen.first is not None and seen.tokens > 1:
                self.spreads["tpot"].add((at - seen.first) / (seen.tokens - 1))
            del self.slots[verdict["slot"]]
        if not self.slots:
            self._ended = None  # what follows is no rest of a step: nobody waits

    def frame(self, at: float, name: str) -> dict[str, Any]:
        """As the dashboard gets it."""
        depth = Counter(seen.lane for seen in self.slots.values())
        lanes = {
            f'verifypd:lane_depth{{lane="{lane}"}}': depth[i] for i, lane in enumerate(("prefill", "decode", "verify"))
        }
        requests = [
            [seen.order, seen.lane, int(slot in self.carried), seen.tokens, round(1e3 * (at - seen.entered))]
            for slot, seen in self.slots.items()
        ]
        drafts = self.counts["vllm:spec_decode_num_drafts_total"]
        return {
            "time": at,
            "server": {"version": __version__, "model": name, "ready": True, "epoch": 1, "drafter": drafts or None},
            "metrics": {**self.counts, **lanes, **self._buckets(), "vllm:num_requests_running": len(self.slots)},
            "live": {
                "time": at,
                "steps": [list(step) for step in self.steps],
                "requests": requests,
                "policy": self.beliefs,
                "changes": list(self.changes),
            },
            "policy": self.policy,
            "architecture": self.architecture,
        }

    def _buckets(self) -> dict[str, float]:
        return {
            f'{LATENCIES[name]}_bucket{{le="{bound if bound < inf else "+Inf"}"}}': count
            for name, spread in self.spreads.items()
            for bound, count in zip(spread.bounds, accumulate(spread.counts), strict=True)
        }


def frames(folder: Path) -> list[dict[str, Any]]:
    """Frames of a record, from its first moment on. Raises RequestError for a folder that holds none."""
    lines = sorted(((_time(line), line) for line in trace.lines(folder)), key=lambda pair: pair[0])
    if not lines:
        raise RequestError(f"{folder / trace.FILE} is empty: nothing was recorded")
    begin, end = lines[0][0], lines[-1][0]
    interval = max(min(LONGEST, max(SHORTEST, (end - begin) / FEWEST)), (end - begin) / MOST)
    books, made, due = Books(), [], begin
    for at, line in lines:
        while at > due:
            made.append(books.frame(due - begin, folder.name))
            due += interval
        books.take(line, at - begin)
    return [*made, books.frame(end - begin, folder.name)]


def _time(line: dict[str, Any]) -> float:
    """s: a plan belongs to when it was launched; its line is written once it has run."""
    return float(line.get("start", line.get("time", 0.0)))
