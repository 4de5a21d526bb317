"""A record as frames of the dashboard: they add up to what the engine did, moment by moment, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import make, parameters, prompts
from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from verifypd.cli import main
from verifypd.engine import trace
from verifypd.errors import RequestError
from verifypd.watch import records, replay

pytestmark = pytest.mark.xdist_group("records")  # one record for all


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A record, and the outputs of its requests."""
    base = tmp_path_factory.mktemp("recorded")
    verifier = tiny("llama", base / "verifier", max_position_embeddings=512)
    pair = verifier, noisy_copy(verifier, base / "draft", 0.15)
    with make(pair, "pdv", record=str(base / "record")) as llm:
        outputs = llm.generate(prompts(8), parameters(8))
        llm.switch_architecture("unified")
        outputs += llm.generate(prompts(3), parameters(3))
    return base / "record", outputs


def test_the_last_frame_adds_up(recorded: tuple[Path, Any]) -> None:
    folder, outputs = recorded
    made = records.frames(folder)
    last = made[-1]["metrics"]
    metrics = [output.metrics for output in outputs]
    assert last["vllm:generation_tokens_total"] == sum(len(o.outputs[0].token_ids) for o in outputs)
    assert last["vllm:spec_decode_num_draft_tokens_total"] == sum(m.drafted for m in metrics) > 0
    assert last["vllm:spec_decode_num_accepted_tokens_total"] == sum(m.accepted for m in metrics)
    assert last["vllm:spec_decode_num_drafts_total"] == sum(m.spans for m in metrics)
    assert last["verifypd:verdicts_total"] == sum(m.passes for m in metrics)
    assert last["verifypd:verdict_tokens_total"] == sum(m.emitted for m in metrics)
    assert last['verifypd:calls_total{outcome="ok"}'] == len(outputs)
    assert last["vllm:num_requests_running"] == 0 and made[-1]["live"]["requests"] == []
    places = [m.drafted_per_position for m in metrics]
    assert last['verifypd:draft_tokens_per_pos_total{position="1"}'] == sum(p[1] for p in places if len(p) > 1)
    for name, count in (("ttft", 11), ("e2e", 11)):
        assert last[f'{records.LATENCIES[name]}_bucket{{le="+Inf"}}'] == count


def test_frames_follow_the_run(recorded: tuple[Path, Any]) -> None:
    made = records.frames(recorded[0])
    times = [frame["time"] for frame in made]
    assert times[0] == 0 and times == sorted(times) and len(made) > 3  # one for every 50 ms
    steps = {step[0] for frame in made for step in frame["live"]["steps"]}
    planned = [line for line in trace.lines(recorded[0]) if line["event"] == "plan"]
    assert steps == {line["step"] for line in planned}
    growing = [frame["metrics"].get("vllm:generation_tokens_total", 0) for frame in made]
    assert growing == sorted(growing)
    assert {frame["policy"] for frame in made[1:]} == {"pdv", "unified"}
    busiest = max(made, key=lambda frame: len(frame["live"]["requests"]))
    assert len(busiest["live"]["requests"]) == 8 == busiest["metrics"]["vllm:num_requests_running"]
    for _, architecture, prefill, draft, verify, rest, *_ in made[-1]["live"]["steps"]:
        assert architecture and prefill + draft + verify > 0 and rest >= 0


def test_two_records_side_by_side(recorded: tuple[Path, Any]) -> None:
    shown = replay.show([recorded[0], recorded[0]])
    assert len(shown.arms) == 2 and not shown.live
    event = shown.events.since(0)[-1]
    rows = event["rows"]
    assert rows[0][1:] == rows[1][1:] and set(event["now"]) == {"0", "1"}
    assert [row[0] for row in rows] == [str(recorded[0])] * 2, "two of one name are told apart by their paths"


def test_a_folder_without_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="give a folder written by --record"):
        records.frames(tmp_path)
    (tmp_path / trace.FILE).write_text("")
    assert main(["replay", str(tmp_path), "--port", "0"]) == 2
    assert "nothing was recorded" in capsys.readouterr().err
    (tmp_path / replay.WATCHED).write_text(json.dumps({"about": {"arms": []}}) + "\n")
    with pytest.raises(RequestError, match="holds no comparison"):
        replay.show([tmp_path])
