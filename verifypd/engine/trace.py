"""Turns a `--record` folder into a Chrome trace, which Perfetto (ui.perfetto.dev) shows. Reads files; runs nothing.

Rows are the lanes, spans are batches with their sizes, counters are acceptance, draft length and batch size. A batch is
drawn for as long as the record says it took; where it does not say, from its launch to the moment it was absorbed.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifypd.errors import RequestError

LANES = ("decode", "verify", "prefill")  # rows of the trace, highest priority first
FILE = "steps.jsonl"
PROCESS = 1


@dataclass(slots=True)
class Batch:
    """One launch of a lane as the record has it. Times in seconds."""

    lane: str
    step: int
    start: float
    end: float
    requests: int
    rows: int
    drafts: int = 0
    longest: int = 0
    chunk_rows: int = 0
    arch: str = ""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What one absorbed pass came to."""

    time: float
    spans: int
    drafted: int
    accepted: int
    tokens: int


@dataclass(slots=True)
class Record:
    """A folder read back: batches, verdict counts by time, and decisions."""

    batches: list[Batch] = field(default_factory=list)
    verdicts: list[Verdicts] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    beliefs: dict[str, Any] = field(default_factory=dict)  # of the policy, the last that were written
    finishes: Counter[str] = field(default_factory=Counter)
    steps: int = 0


def read(folder: str | Path) -> Record:
    """Read a record. Raises RequestError, in one line, for a folder that holds none or a file that is damaged."""
    record = Record()
    waiting: deque[Batch] = deque()  # passes whose verdicts have not been absorbed yet
    last = None
    for line in lines(Path(folder)):
        event, time = line.get("event"), float(line.get("time", 0.0))
        if event == "plan":
            record.steps += 1
            begin = float(line.get("start", time if last is None else min(last, time)))
            for batch in _batches(line, begin, time):
                record.batches.append(batch)
                if batch.lane != "decode" and not _known(line, batch.lane):
                    waiting.append(batch)
        elif event == "verdicts":
            if waiting:
                batch = waiting.popleft()
                batch.end = max(batch.start, time)
            verdicts = line["verdicts"]
            sums = (sum(v[name] for v in verdicts) for name in ("drafted", "accepted", "tokens"))
            record.verdicts.append(Verdicts(time, len(verdicts), *sums))
            record.finishes.update(v["finish"] for v in verdicts if v["finish"])
        elif event == "decision":
            record.decisions.append(line)
        elif event == "policy":
            record.beliefs = {name: value for name, value in line.items() if name not in ("event", "step", "time")}
        last = time
    return record


def lines(folder: Path, name: str = FILE) -> Iterator[dict[str, Any]]:
    """What a record holds, line by line. Raises RequestError as `read` does."""
    path = folder / name
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                except ValueError:
                    if text.endswith("\n"):
                        raise RequestError(f"{path} line {number} is not JSON; was it written by --record?") from None
                    return  # the writer was stopped in the middle of the last line
                if not isinstance(line, dict):
                    raise RequestError(f"{path} line {number} is not an object; was it written by --record?")
                yield line
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a folder written by --record") from None


def _known(line: dict[str, Any], lane: str) -> bool:
    """Whether the record itself says how long a lane's batch took."""
    return _SECONDS[lane] in line


_SECONDS = {"decode": "draft_seconds", "verify": "verify_seconds", "prefill": "prefill_seconds"}


def _batches(line: dict[str, Any], begin: float, end: float) -> Iterator[Batch]:
    """The batches of one plan, in launch order: one follows the other where their times are known."""
    at = begin
    for lane, key in zip(LANES, ("draft", "verify", "prefill"), strict=True):
        spans = line.get(key) or []
        if not spans:
            continue
        took = line.get(_SECONDS[lane])
        until = max(at, end) if took is None else at + float(took)
        chunks = [span for span in spans if span.get("start") is not None]
        yield Batch(
            lane,
            int(line["step"]),
            at,
            until,
            requests=len(spans),
            rows=sum(span["rows"] for span in spans),
            drafts=sum(span["drafts"] for span in spans),
            longest=max(span["drafts"] for span in spans),
            chunk_rows=sum(span["rows"] for span in chunks),
            arch=str(line.get("arch", "")),
        )
        at = at if took is None else until


# -- Chrome trace ------------------------------------------------------------------------------------------------------


def chrome_trace(record: Record) -> dict[str, Any]:
    """The record in the JSON form that Perfetto and chrome://tracing read."""
    origin = min((batch.start for batch in record.batches), default=0.0)
    events = list(_names())
    events += [_span(batch, origin) for batch in record.batches]
    events += _counters(record, origin)
    events += [_mark(decision, origin) for decision in record.decisions]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(folder: str | Path, out: str | Path) -> int:
    """Export a record folder to a file; returns the number of batches drawn."""
    record = read(folder)
    try:
        Path(out).write_text(json.dumps(chrome_trace(record)), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {out}: {error.strerror}") from None
    return len(record.batches)


def _names() -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "verifypd"}}
    for row, lane in enumerate(LANES, 1):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": row, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": row, "args": {"sort_index": row}}


def _span(batch: Batch, origin: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{batch.lane} {batch.requests}×{batch.rows}",
        "pid": PROCESS,
        "tid": 1 + LANES.index(batch.lane),
        "ts": _micros(batch.start - origin),
        "dur": max(1, _micros(batch.end - batch.start)),
        "args": {
            "step": batch.step,
            "requests": batch.requests,
            "rows": batch.rows,
            "draft_tokens": batch.drafts,
            "longest_draft": batch.longest,
            "chunk_rows": batch.chunk_rows,
            "architecture": batch.arch,
        },
    }


def _counters(record: Record, origin: float) -> Iterable[dict[str, Any]]:
    for batch in record.batches:
        if batch.lane == "decode":
            yield _counter("draft length", batch.start - origin, {"longest": batch.longest})
        elif batch.lane == "verify":
            yield _counter("verify batch", batch.start - origin, {"requests": batch.requests})
    for verdicts in record.verdicts:
        if verdicts.drafted:
            yield _counter("acceptance", verdicts.time - origin, {"rate": verdicts.accepted / verdicts.drafted})
        yield _counter("tokens out", verdicts.time - origin, {"tokens": verdicts.tokens})


def _counter(name: str, at: float, values: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": PROCESS, "ts": _micros(at), "args": values}


def _mark(decision: dict[str, Any], origin: float) -> dict[str, Any]:
    at = max(0.0, float(decision.get("time", origin)) - origin)
    name = f"{decision.get('architecture', 'decision')}: {decision.get('reason', '')}"
    return {"ph": "i", "s": "p", "name": name, "pid": PROCESS, "tid": 1, "ts": _micros(at), "args": decision}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


# -- in words ----------------------------------------------------------------------------------------------------------


def explain(record: Record) -> str:
    """What the run did and why: batches by lane, acceptance, and every decision with its reason."""
    lines = [f"{record.steps} steps, {len(record.batches)} batches, {_seconds(record):.2f} s"]
    shares = Counter(arch for _, arch in {(batch.step, batch.arch) for batch in record.batches if batch.arch})
    if shares:
        lines.append("architecture: " + ", ".join(f"{arch} in {count} steps" for arch, count in shares.most_common()))
    for lane in LANES:
        batches = [batch for batch in record.batches if batch.lane == lane]
        if batches:
            lines.append(_lane_line(lane, batches))
    spans, drafted = sum(v.spans for v in record.verdicts), sum(v.drafted for v in record.verdicts)
    accepted, tokens = sum(v.accepted for v in record.verdicts), sum(v.tokens for v in record.verdicts)
    if spans:
        rate = f"acceptance rate {accepted / drafted:.2f} of {drafted} drafted" if drafted else "nothing drafted"
        lines.append(f"verdicts: {tokens} tokens from {spans} spans ({tokens / spans:.2f} each), {rate}")
    if record.finishes:
        lines.append("ended: " + ", ".join(f"{count} by {name}" for name, count in sorted(record.finishes.items())))
    if record.beliefs:
        lines.append("policy at the end: " + ", ".join(f"{name} {_short(v)}" for name, v in record.beliefs.items()))
    if not record.decisions:
        return "\n".join([*lines, "no decision of the policy recorded; --step N explains the plan of a step"])
    lines.append(f"{len(record.decisions)} decisions:")
    first = min((batch.start for batch in record.batches), default=0.0)
    return "\n".join(lines + [_decision_line(decision, first) for decision in record.decisions])


def explain_step(folder: str | Path, step: int) -> str:
    """The plan of one step, its runner-up and the value of each, in the words of docs/lanes.md."""
    first = last = None
    for line in lines(Path(folder)):
        if line.get("event") != "plan":
            continue
        last = int(line["step"])
        first = last if first is None else first
        if last == step:
            return "\n".join(_step_lines(line))
    if first is None:
        raise RequestError(f"{Path(folder) / FILE} holds no step")
    raise RequestError(f"step {step} is not in this record; it has steps {first} to {last}")


def _step_lines(line: dict[str, Any]) -> Iterator[str]:
    why = line.get("why") or {}
    spans = [*(line.get("verify") or []), *(line.get("prefill") or [])]
    chunks = [span for span in spans if span.get("start") is not None]
    drafts = [span["drafts"] for span in line.get("draft") or [] if span["drafts"]]
    decoding = len(spans) - len(chunks)
    yield (
        f"step {line['step']}, {line.get('arch', '?')}: {decoding} requests decode, {len(drafts)} "
        f"draft {sum(drafts)} tokens, {len(chunks)} prompts get {sum(span['rows'] for span in chunks)} tokens"
    )
    if "longest" in why and (decoding or drafts):
        weighed = why.get("weighed", line["step"])
        when = "" if weighed == line["step"] else f", as weighed at step {weighed}"
        probe = "a token each, to learn; best: " if drafts and why["mode"] == "probing" else ""
        second = f"next best: {_weighed(why, 'next_')}" if "next_longest" in why else "nothing else was possible"
        yield f"drafts ({why['mode']}{when}): {probe}{_weighed(why)}; {second}"
        if (worth := why.get("worth_ms", 0.0)) * why["tokens"] > why["ms"]:
            yield f"beside these prompts targets let a token take {worth:.3f} ms"
    if "value_ms" in why:
        second = f"next best: {_read(why, 'next_')}" if "next_value_ms" in why else "nothing else was possible"
        yield f"prompts: {_read(why)}; {second}"
    if not (decoding or drafts):
        yield "nothing was weighed: nobody decodes, so as much of the prompts is read as a pass takes"
    elif not why:
        yield "nothing was weighed: the controller drafts by fixed rules, and no prompt waited beside those who decode"
    took = [f"{lane} {1e3 * line[name]:.1f}" for lane, name in _SECONDS.items() if name in line]
    yield f"took, ms: {', '.join(took)}"


def _weighed(why: dict[str, Any], prefix: str = "") -> str:
    """A longest draft and what decided: ms a token."""
    tokens, ms = why[f"{prefix}tokens"], why[f"{prefix}ms"]
    return f"{_longest(why[f'{prefix}longest'])}, {tokens:.1f} tokens for {ms:.2f} ms: {ms / tokens:.3f} ms a token"


def _read(why: dict[str, Any], prefix: str = "") -> str:
    """So many prompt tokens, and what decided."""
    tokens, step, worth = (why[f"{prefix}{name}"] for name in ("prompt_tokens", "step_ms", "value_ms"))
    return f"{tokens} tokens, a step of {step:.1f} ms, value {worth:+.2f} ms"


def _longest(drafts: int) -> str:
    return f"at most {drafts} each" if drafts else "none"


def _lane_line(lane: str, batches: list[Batch]) -> str:
    count = len(batches)
    text = (
        f"{lane}: {count} batches, {sum(b.requests for b in batches) / count:.1f} requests "
        f"(1 to {max(b.requests for b in batches)}) and {sum(b.rows for b in batches) / count:.1f} rows each"
    )
    if lane == "decode":
        text += f", longest draft {sum(b.longest for b in batches) / count:.1f} on average"
    chunks = sum(b.chunk_rows for b in batches)
    return text + (f", {chunks} prompt tokens" if chunks else "")


def _decision_line(decision: dict[str, Any], first: float) -> str:
    at = float(decision.get("time", first)) - first
    known = {"event", "time", "step", "reason", "architecture"}
    rest = ", ".join(f"{name} {_short(value)}" for name, value in decision.items() if name not in known)
    text = f"  {at:9.3f} s  {decision.get('architecture', '?')}: {decision.get('reason', 'no reason given')}"
    return text + (f" ({rest})" if rest else "")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_short(v)}" for name, v in value.items()) + "}"
    return str(value)


def _seconds(record: Record) -> float:
    ends = [batch.end for batch in record.batches] + [verdicts.time for verdicts in record.verdicts]
    return max(ends, default=0.0) - min((batch.start for batch in record.batches), default=0.0)
