"""The trace of a recorded run: lanes as rows, batches as spans, counters; and the run in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verifypd.cli import main
from verifypd.engine import trace
from verifypd.engine.llm import LLM
from verifypd.errors import RequestError
from verifypd.request import SamplingParams


def draft_span(slot: int, drafts: int) -> dict[str, Any]:
    return {"slot": slot, "lag": 2, "rows": 2, "drafts": drafts, "context": 20}


def verify_span(slot: int, drafts: int = 0, start: int | None = None, rows: int | None = None) -> dict[str, Any]:
    rows = drafts + 1 if rows is None else rows
    return {"slot": slot, "rows": rows, "drafts": drafts, "start": start, "emits": True, "context": 20}


def verdict(slot: int, drafted: int, accepted: int, finish: str | None = None) -> dict[str, Any]:
    return {"slot": slot, "drafted": drafted, "accepted": accepted, "tokens": accepted + 1, "finish": finish}


LINES = [
    {
        "event": "plan",
        "step": 1,
        "time": 100.0,
        "draft": [draft_span(0, 4), draft_span(1, 2)],
        "verify": [verify_span(0, 4), verify_span(1, 2), verify_span(2, start=0, rows=32)],
    },
    {"event": "verdicts", "time": 100.01, "rows": 40, "verdicts": [verdict(0, 4, 3), verdict(1, 2, 0, "length")]},
    {"event": "plan", "step": 2, "time": 100.01, "draft": [], "verify": [verify_span(0)]},
    {"event": "verdicts", "time": 100.02, "rows": 1, "verdicts": [verdict(0, 0, 0)]},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / trace.FILE).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_lanes_are_rows_and_batches_are_spans_with_sizes(folder: Path) -> None:
    events = trace.chrome_trace(trace.read(folder))["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == ["decode", "verify", "prefill"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(rows[e["tid"]], e["args"]["step"], e["args"]["requests"], e["args"]["rows"]) for e in spans] == [
        ("decode", 1, 2, 4),
        ("verify", 1, 3, 40),
        ("verify", 2, 1, 1),
    ]
    assert spans[1]["args"]["chunk_rows"] == 32
    assert spans[1]["ts"] == 0 and spans[1]["dur"] == 10_000, "from launch to absorption, in microseconds"


def test_acceptance_and_draft_length_are_counters(folder: Path) -> None:
    events = trace.chrome_trace(trace.read(folder))["traceEvents"]
    counters = [(e["name"], e["args"]) for e in events if e["ph"] == "C"]
    assert ("acceptance", {"rate": 0.5}) in counters
    assert ("draft length", {"longest": 4}) in counters
    assert ("tokens out", {"tokens": 5}) in counters


def test_times_the_record_knows_are_used(tmp_path: Path) -> None:
    plan = LINES[0] | {"start": 50.0, "draft_seconds": 0.004, "verify_seconds": 0.006, "prefill": [verify_span(3)]}
    (tmp_path / trace.FILE).write_text(json.dumps(plan | {"prefill_seconds": 0.002}))
    decode, verify, prefill = trace.read(tmp_path).batches
    assert (decode.start, verify.start, prefill.start) == pytest.approx((50.0, 50.004, 50.01))
    assert prefill.end == pytest.approx(50.012)


def test_a_line_cut_short_at_the_end_is_left_out(folder: Path) -> None:
    with (folder / trace.FILE).open("a") as file:
        file.write('{"event": "pl')
    assert trace.read(folder).steps == 2


@pytest.mark.parametrize("text", ["nonsense\n", "[1]\n"])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / trace.FILE).write_text(text)
    with pytest.raises(RequestError, match="--record"):
        trace.read(tmp_path)


def test_commands(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["trace", str(folder), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["traceEvents"]
    assert main(["explain", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "3 batches written" in text
    assert "acceptance rate 0.50 of 6 drafted" in text
    assert "1 by length" in text
    assert main(["explain", str(tmp_path / "nothing")]) == 2
    for content in (b'{"event": "plan", "draft": [{"rows": 1}]}\n', b"\xff\n"):
        (tmp_path / trace.FILE).write_bytes(content)
        capsys.readouterr()
        for command in ("explain", "trace", "replay"):
            assert main([command, str(tmp_path)]) == 2
            assert capsys.readouterr().err.count("\n") == 1


def test_decisions_are_told_with_reasons(folder: Path) -> None:
    decision = {"event": "decision", "time": 100.005, "architecture": "unified", "reason": "predicted 1.2x"}
    decision |= {"gain": 1.2}
    with (folder / trace.FILE).open("a") as file:
        file.write(json.dumps(decision) + "\n")
    record = trace.read(folder)
    assert "unified: predicted 1.2x (gain 1.2)" in trace.explain(record)
    assert any(e["ph"] == "i" for e in trace.chrome_trace(record)["traceEvents"])


def test_what_the_policy_believed_is_told(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A real run under `auto`: the calibration error of its forecasts is in the record and in the explanation."""
    settings = {"arch": "auto", "controller": "throughput", "record": str(tmp_path), "kv_memory": "16MB"}
    settings["measure_costs"] = False
    with LLM(str(pair[0]), draft=str(pair[1]), max_model_len=128, **settings) as llm:
        llm.generate([[5, 6, 7, 8] * 6], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    beliefs = trace.read(tmp_path).beliefs
    assert beliefs["architecture"] in ("plain", "unified", "pd", "pdv")
    assert 0.0 <= beliefs["calibration_error"] <= 1.0 and beliefs["cost_error"] >= 0.0
    assert "calibration_error" in trace.explain(trace.read(tmp_path))


def test_one_step_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan, what it was chosen over, and what it took; a step that is not there is said so."""
    why = {
        "mode": "drafting",
        "longest": 4,
        "tokens": 6.8,
        "ms": 0.62,
        "next_longest": 0,
        "next_tokens": 2.0,
        "next_ms": 0.5,
        "prompt_tokens": 32,
        "step_ms": 12.3,
        "value_ms": 0.41,
        "next_prompt_tokens": 16,
        "next_step_ms": 9.9,
        "next_value_ms": -0.25,
    }
    first, *rest = LINES
    lines = [{**first, "arch": "unified", "why": why, "draft_seconds": 0.0015, "verify_seconds": 0.011}, *rest]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["explain", str(tmp_path), "--step", "1"]) == 0
    said = capsys.readouterr().out
    assert "step 1, unified: 2 requests decode, 2 draft 6 tokens, 1 prompts get 32 tokens" in said
    drafts = "drafts (drafting): at most 4 each, 6.8 tokens for 0.62 ms: 0.091 ms a token"
    assert f"{drafts}; next best: none, 2.0 tokens for 0.50 ms: 0.250 ms a token" in said
    prompts = "prompts: 32 tokens, a step of 12.3 ms, value +0.41 ms"
    assert f"{prompts}; next best: 16 tokens, a step of 9.9 ms, value -0.25 ms" in said
    assert "took, ms: decode 1.5, verify 11.0" in said
    lines[0]["why"] = why | {"worth_ms": 0.2, "ms": 1.2}
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = trace.explain_step(tmp_path, 1)
    assert "0.176 ms a token; next best: none, 2.0 tokens for 0.50 ms: 0.250 ms a token" in said
    assert "beside these prompts targets let a token take 0.200 ms" in said
    lines[0]["why"] = {"mode": "plain", "weighed": 0, "longest": 0, "tokens": 2.0, "ms": 0.5}
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = trace.explain_step(tmp_path, 1)
    assert "drafts (plain, as weighed at step 0): none, 2.0 tokens for 0.50 ms: 0.250 ms a token" in said
    assert "nothing else was possible" in said
    lines[0]["why"] = {"mode": "probing", "weighed": 1, "longest": 0, "tokens": 2.0, "ms": 0.5}
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "drafts (probing): a token each, to learn; best: none, 2.0 tokens for" in trace.explain_step(tmp_path, 1)
    with pytest.raises(RequestError, match="step 9 is not in this record; it has steps 1 to"):
        trace.explain_step(tmp_path, 9)
    assert "nothing was weighed" in trace.explain_step(tmp_path, 2)


def test_a_step_is_explained_by_what_it_was_chosen_over_and_nothing_else(tmp_path: Path) -> None:
    """The only chunk there was is no runner-up, and what drafts came to before is not why prompts alone are read."""
    prompt = verify_span(0, start=0, rows=4)
    drafts = {"mode": "plain", "weighed": 1, "longest": 0, "tokens": 1.0, "ms": 0.5}
    chunk = {"prompt_tokens": 4, "step_ms": 2.7, "value_ms": 20.76}
    steps = [([verify_span(1), prompt], drafts | chunk), ([prompt], drafts)]
    plans = [
        {"event": "plan", "step": number, "time": 1.0, "verify": spans, "why": why}
        for number, (spans, why) in enumerate(steps, 2)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in plans))
    assert "value +20.76 ms; nothing else was possible" in trace.explain_step(tmp_path, 2)
    said = trace.explain_step(tmp_path, 3)
    assert "nobody decodes" in said and "drafts (" not in said
