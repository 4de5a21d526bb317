"""Engines side by side: figures by hand, pooling, ratios, turns, and whole runs with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench import fake_vllm
from tests.bench.scripts import load
from verifypd.bench import beside
from verifypd.bench.arms import Setup, graph_sizes, parse, start_message
from verifypd.bench.beside import AGAIN, ArmError, Cell, Comparison, closed_cell, open_cell, table
from verifypd.bench.figures import CLOSED, Outcome, Ratio, Record, figures, ratios, sample
from verifypd.bench.workload import Arrival, Workload, mixed, prompts, read
from verifypd.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "beside_vllm.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return load("beside_vllm")


def record(due: float, outputs: list[float], tokens: int, finished: bool = True, first: int = 1) -> Record:
    return Record(due, due, tuple(outputs), tokens, first, finished)


def steady(count: int, step: float, tokens: int = 9, seconds: float | None = None) -> Outcome:
    """Requests that all arrive at 0 and get a token every `step` s, a little later each."""
    records = [record(0.0, [step * (1 + i / 50) * (n + 1) for n in range(tokens)], tokens) for i in range(count)]
    return Outcome(tuple(records), count, seconds or max(r.outputs[-1] for r in records))


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    good = record(1.0, [1.2, 1.21, 1.24], 6)  # TTFT 200, TPOT 40 / 5 = 8, gaps 10 and 30
    slow = record(2.0, [2.1, 2.2], 5)  # TTFT 100, TPOT 100 / 4 = 25, gap 100
    stopped = record(3.0, [], 0, finished=False, first=0)  # waited 2 s
    found = figures([Outcome((good, slow, stopped), 4, 5.0)])
    assert found["ttft_ms_p50"] == pytest.approx(200) and found["ttft_ms_p95"] == pytest.approx(2000)
    assert found["tpot_ms_p50"] == pytest.approx(8) and found["tpot_ms_p99"] == pytest.approx(25)
    assert found["gap_ms_p50"] == pytest.approx(30) and found["gap_ms_max"] == pytest.approx(100)
    assert found["gaps_late"] == pytest.approx(2 / 3)  # longer than 15 ms
    assert found["e2e_ms_p50"] == pytest.approx(240) and found["e2e_ms_p95"] == pytest.approx(2000)
    assert found["tok_s"] == pytest.approx(11 / 5) and found["goodput"] == pytest.approx(1 / 5)
    assert found["good_share"] == pytest.approx(1 / 4)
    assert found["tokens_per_output"] == pytest.approx(9 / 3)  # first outputs apart
    assert found["requests"] == 4 and found["unfinished"] == 2


def test_a_late_sender_counts_from_when_a_request_was_due() -> None:
    found = figures([Outcome((Record(1.0, 1.5, (1.6, 1.7), 2, 1, True),), 1, 1.7)])
    assert found["ttft_ms_p50"] == pytest.approx(600) and found["sent_late_ms_p95"] == pytest.approx(500)


def test_runs_are_pooled() -> None:
    fast, slow = steady(10, 0.01), steady(10, 0.03)
    found = figures([fast, slow])
    assert found["requests"] == 20
    assert found["tok_s"] == pytest.approx(180 / (fast.seconds + slow.seconds))
    assert (
        figures([fast])["tpot_ms_p95"] < found["tpot_ms_p95"] == pytest.approx(figures([slow])["tpot_ms_p95"], rel=0.03)
    )
    assert found["tpot_ms_p50"] == pytest.approx(figures([fast])["tpot_ms_p99"])


def test_times_travel_whole() -> None:
    outcome = Outcome((record(0.5, [0.7, 0.75, 1.0], 7, first=2), record(1.0, [], 0, False, 0)), 3, 1.25)
    assert Outcome.unpacked(json.loads(json.dumps(outcome.packed()))) == outcome


def test_a_control_reads_no_difference_and_an_arm_twice_as_slow_does() -> None:
    found = ratios(CLOSED, sample([steady(40, 0.01)] * 2), sample([steady(40, 0.01)] * 2))
    assert set(found) == set(CLOSED)
    assert all(ratio.value == 1.0 and ratio.reading() == "no difference" for ratio in found.values())
    slow = ratios(CLOSED, sample([steady(40, 0.02)]), sample([steady(40, 0.01)]))
    assert slow["tok_s"].value == pytest.approx(0.5) and slow["tok_s"].reading() == "lower"
    for name in ("tpot_ms_p50", "tpot_ms_p95", "ttft_ms_p50", "gap_ms_p50", "gap_ms_p99"):
        assert slow[name].value == pytest.approx(2.0) and slow[name].reading() == "higher"
        assert slow[name].low == pytest.approx(2.0, rel=0.02) and slow[name].high == pytest.approx(2.0, rel=0.02)
    unpaired = ratios(CLOSED, sample([steady(40, 0.02)]), sample([steady(30, 0.01)]))["tpot_ms_p50"]
    assert unpaired.low < unpaired.high and unpaired.reading() == "higher"


def test_a_ratio_within_the_noise_of_the_control_is_no_difference() -> None:
    ratio = Ratio(1.05, 1.03, 1.07)
    assert ratio.reading() == "higher"
    assert ratio.reading(noise=0.04) == "no difference"


# -- arms and work -----------------------------------------------------------------------------------------------------


def test_traffic_is_that_of_the_files() -> None:
    folder = ROOT / "benchmarks" / "workloads"
    assert mixed(16, 20, 0).arrivals == read(folder / "mixed-16.json").arrivals
    assert mixed(8, 60, 2).arrivals == read(folder / "long-8-seed2.json").arrivals


def test_tokens_of_traffic_that_is_there_at_once() -> None:
    arrivals = (Arrival(0.0, 100, 10), Arrival(0.05, 50, 10), Arrival(0.2, 120, 10))  # 0.1 s each
    assert Workload("x", 1, arrivals).most_tokens(0.01) == 170


def test_arms_by_name(tmp_path: Path) -> None:
    setup = Setup("llama-2-7b", 0.8, 128, 4608, 10**10, (1, 8, 32, 128))

    def settings(text: str) -> dict[str, Any]:
        arm = parse(text)
        return start_message(arm, setup, tmp_path / arm.file_name)["settings"]

    plain = settings("ours:plain")
    assert plain["draft"] is None and plain["arch"] == "plain" and "synthetic_acceptance" not in plain
    assert settings("ours:head")["draft"] == "eagle" and settings("ours:eagle3")["draft"] == "eagle3"
    tiny = settings("ours:tiny1b:arch=unified,controller=fixed,max_draft=8")
    assert Path(tiny["draft"]).name == "tinyllama-1.1b" and tiny["max_draft"] == 8 and tiny["arch"] == "unified"
    both = settings("ours:auto:draft=eagle,ngram,slo_tpot=10")
    assert both["draft"] == "eagle,ngram" and both["slo_tpot"] == 10
    eagle = settings("vllm:eagle")
    rates = eagle["speculative_config"]["synthetic_acceptance_rates"]
    assert rates == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    assert eagle["kv_cache_memory_bytes"] == plain["kv_memory"] and eagle["max_num_seqs"] == plain["batch_size"]
    shape = json.loads((Path(eagle["speculative_config"]["model"]) / "config.json").read_text())
    assert shape["num_hidden_layers"] == 1 and shape["hidden_size"] == 4096
    assert settings("vllm:tiny1b:k=2,max_num_batched_tokens=1024")["speculative_config"]["num_speculative_tokens"] == 2
    assert "speculative_config" not in settings("vllm:plain")
    assert setup.token_bytes == 512 * 1024
    for wrong in ("theirs:plain", "ours:nothing", "vllm:plain:quick"):
        with pytest.raises(ConfigError, match="arm"):
            parse(wrong)
    with pytest.raises(ConfigError, match="unknown setting"):
        settings("ours:plain:colour=red")


def test_graphs_for_the_batches_that_come() -> None:
    assert graph_sizes([1, 8], 8, 0) == [1, 2, 3, 4, 6, 8]
    assert graph_sizes([1], 4, 4) == [5, 10, 15, 20, 25]


# -- turns -------------------------------------------------------------------------------------------------------------


class Canned:
    """A worker that answers at once."""

    def __init__(self, arm: Any, tasks: list[tuple[str, dict[str, Any]]], step: float) -> None:
        self.arm, self.tasks, self.step, self.failed = arm, tasks, step, False

    def answer(self, timeout: float) -> dict[str, Any]:
        if self.step == 0:
            raise ArmError(f"{self.arm.name} ended")
        return {"kind": "ready", "start_seconds": 0.0}

    def run(self, task: dict[str, Any], cap: float) -> Outcome:
        self.tasks.append((self.arm.name, task))
        count = task["requests"] if task["kind"] == "closed" else len(task["workload"])
        return steady(count, self.step)

    def last_words(self) -> str:
        return ""

    def hang_up(self) -> None: ...

    def close(self, patience: float = 0.0) -> None: ...


def compare(
    steps: dict[str, float], cells: list[Cell], seconds: float = 1e6, at_once: int = 9, **options: Any
) -> tuple[Comparison, list[tuple[str, dict[str, Any]]]]:
    arms = [parse(name) for name in steps]
    tasks: list[tuple[str, dict[str, Any]]] = []
    options = {"references": ["vllm:plain"], "control": "ours:plain", **options}
    comparison = Comparison(arms, cells, save=json.dumps, say=str, **options)
    groups = [arms[i : i + at_once] for i in range(0, len(arms), at_once)]
    comparison.run(groups, lambda arm: Canned(arm, tasks, steps[arm.name]), seconds)  # type: ignore[arg-type, return-value]
    return comparison, tasks


def test_all_arms_get_the_same_work_in_turns() -> None:
    arrivals = [mixed(8, 5, seed).arrivals for seed in (0, 1)]
    cells = [closed_cell(2, 20, 8, [0, 1], 400), open_cell(8, arrivals, [0, 1], 400)]
    comparison, tasks = compare({"ours:plain": 0.01, "ours:head": 0.004, "vllm:plain": 0.01}, cells)
    runs = [(run["cell"], run["turn"], run["arm"]) for run in comparison.report["runs"]]
    again = "ours:plain" + AGAIN
    first = ["ours:plain", "vllm:plain", "ours:head", again]  # what measures at start starts last
    assert [arm for cell, turn, arm in runs if (cell, turn) == ("closed 2", 0)] == first
    assert [arm for cell, turn, arm in runs if (cell, turn) == ("mixed 8", 1)] == [*first[1:], first[0]]
    by_arm = {name: [task for arm, task in tasks if arm == name] for name in ("ours:head", "vllm:plain")}
    assert by_arm["ours:head"] == by_arm["vllm:plain"] and len(by_arm["vllm:plain"]) == 2 * 3  # a warm-up each
    entry = comparison.report["cells"]["closed 2"]
    assert entry["ours:plain"]["seeds"] == 2 and entry["ours:plain"]["figures"]["requests"] == 24
    assert all(each["reading"] == "no difference" for each in entry[again]["over"]["ours:plain"].values())
    assert entry["ours:head"]["over"]["vllm:plain"]["tok_s"]["reading"] == "higher"
    assert entry["vllm:plain"]["over"] == {}
    assert comparison.report["complete"]
    assert all(text in table(comparison.report) for text in ("closed 2", "mixed 8", again))


def test_arms_of_two_groups_are_compared() -> None:
    comparison, _ = compare({"ours:plain": 0.02, "vllm:plain": 0.01}, [closed_cell(2, 20, 8, [0], 400)], at_once=1)
    over = comparison.report["cells"]["closed 2"]["ours:plain"]["over"]["vllm:plain"]
    assert over["tok_s"]["ratio"] == pytest.approx(0.5) and comparison.report["complete"]


def test_only_seeds_that_both_arms_have_are_compared() -> None:
    comparison, _ = compare({"ours:plain": 0.02, "vllm:plain": 0.01}, [closed_cell(2, 20, 8, [0, 1], 400)])
    comparison.outcomes["closed 2"]["ours:plain"][1] = steady(12, 5.0)
    del comparison.outcomes["closed 2"]["vllm:plain"][1]
    comparison._compare(comparison.cells[0])
    over = comparison.report["cells"]["closed 2"]["ours:plain"]["over"]["vllm:plain"]
    assert over["tpot_ms_p95"]["ratio"] == pytest.approx(2.0)


def test_what_would_not_end_is_not_begun() -> None:
    cells = [closed_cell(1, 384, 256, [0], 400, least=24), closed_cell(4, 20, 8, [0], 400)]
    comparison, tasks = compare({"ours:plain": 0.01, "vllm:plain": 0.01}, cells, seconds=beside.CLOSING + 20)
    assert [each["cell"] for each in comparison.report["skipped"]] == ["closed 1"]
    assert {task["concurrency"] for _, task in tasks} == {4}
    assert not comparison.report["complete"] and "left out: closed 1" in table(comparison.report)


def test_an_arm_that_does_not_start_is_left_out() -> None:
    comparison, _ = compare({"ours:plain": 0.01, "vllm:plain": 0.0}, [closed_cell(2, 20, 8, [0], 400)])
    assert "error" in comparison.report["arms"]["vllm:plain"] and comparison.report["errors"]
    assert set(comparison.report["cells"]["closed 2"]) == {"ours:plain", "ours:plain" + AGAIN}


def test_requests_of_a_level() -> None:
    counts = [closed_cell(n, 384, 256, [0, 1], 400).tasks[0]["requests"] for n in (1, 8, 128)]
    assert counts == [12, 24, 384]


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_vllm.write(tmp_path_factory.mktemp("peer"))


@pytest.mark.slow
def test_ours_beside_a_stand_in(script: Any, peer: Path, tmp_path: Path) -> None:
    out, raw = tmp_path / "beside.json", tmp_path / "raw.jsonl"
    script.main(
        ["--tiny", "--peer", str(peer), "--arms", "ours:plain", "ours:tiny1b:max_draft=3", "vllm:eagle", "--batch", "4",
         "--control", "vllm:eagle", "--levels", "2", "--rates", "40", "--seeds", "0,3", "--requests", "6",
         "--each", "1", "--json", str(out), "--raw", str(raw)]
    )  # fmt: skip
    report = json.loads(out.read_text())
    assert report["complete"], report["errors"]
    assert set(report["arms"]) == {"ours:plain", "ours:tiny1b:max_draft=3", "vllm:eagle"}
    assert report["arms"]["vllm:eagle"]["v2_runner"] and report["arms"]["vllm:eagle"]["start_seconds"] > 0
    assert report["settings"]["ours:tiny1b:max_draft=3"]["max_draft"] == 3 and report["commit"]
    for arms in report["cells"].values():
        assert set(arms) == {*report["arms"], "vllm:eagle again"}
        assert all(arm["figures"]["unfinished"] == 0 and arm["seeds"] == 2 for arm in arms.values())
    closed = report["cells"]["closed 2"]
    assert closed["ours:plain"]["figures"]["tokens_per_output"] == 1.0
    assert closed["vllm:eagle"]["figures"]["tokens_per_output"] == 3.5  # 1 + 4 + 3 of eight tokens
    assert "tok_s" in closed["ours:plain"]["over"]["vllm:eagle"]

    runs = [json.loads(line) for line in raw.read_text().splitlines()]
    for turn, seed in ((0, 0), (1, 3)):
        due = [
            [request[0] / 1e6 for request in run["requests"]]
            for run in runs
            if run["cell"] == "mixed 40" and run["turn"] == turn
        ]
        assert len(due) == 4 and all(each == pytest.approx(due[0], abs=2e-6) for each in due)
        assert due[0] == pytest.approx([arrival.at for arrival in mixed(40, 20, seed).arrivals[:8]], abs=2e-6)
    sent = {tuple(json.loads(line)) for line in (peer / "cache" / "prompts").read_text().splitlines()}
    assert {tuple(ids) for ids in prompts([20] * 3, 400, 4)} <= sent  # what `Drive` makes of the same seed
    assert not list(tmp_path.glob("*.part")) and "noise" in (tmp_path / "vllm-eagle.log").read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_its_report(peer: Path, tmp_path: Path) -> None:
    out = tmp_path / "beside.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--peer", str(peer), "--arms", "vllm:plain", "--levels", "1"]
    command += ["--seeds", ",".join(map(str, range(200))), "--control", "none", "--json", str(out)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if out.exists() and len(json.loads(out.read_text())["runs"]) > 1:
                break
            time.sleep(0.05)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    report = json.loads(out.read_text())
    assert not report["complete"] and len(report["runs"]) > 1
    assert report["cells"]["closed 1"]["vllm:plain"]["figures"]["tok_s"] > 0


def test_an_arm_that_fails_says_so(script: Any, peer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--peer", str(peer), "--arms", "vllm:plain", "--levels", "1", "--kv-memory", "2GB"]
    report = script.main([*arguments, "--json", str(tmp_path / "x.json")])
    assert report["errors"] == ["vllm:plain: ValueError: no memory for that"] and not report["complete"]
    assert "Traceback" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--arms", "ours:nothing"], "is not known"),
        (["--arms", "ours:plain", "ours:plain"], "named twice"),
        (["--arms", "ours:plain", "--control", "vllm:plain"], "none of the arms"),
        (["--arms", "ours:plain", "--levels", "256"], "more than --batch"),
        (["--arms", "ours:plain", "--model", "nothing", "--tiny"], "no built-in model"),
        (["--arms", "ours:plain:colour=red", "--tiny"], "unknown setting"),
        (["--arms", "ours:plain", "--peer", "nowhere"], "no folder site"),
        (["--arms", "ours:plain", "ours:head", "vllm:plain", "vllm:eagle", "--plan"], "smaller --at-once"),
    ],
)
def test_what_it_refuses(script: Any, capsys: pytest.CaptureFixture[str], given: list[str], said: str) -> None:
    with pytest.raises(SystemExit):
        script.main(given)
    assert said in capsys.readouterr().err


def test_a_plan_runs_nothing(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["ours:plain", "vllm:plain", "ours:head", "vllm:eagle"]
    assert script.main(["--plan", "--arms", *arms, "--at-once", "2", "--kv-memory", "48GB"]) == {}
    assert "closed 128: 2 x 3 x" in capsys.readouterr().out
