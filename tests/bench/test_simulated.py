"""Protocols in the simulator: labelled, with costs that scale, and a queue that waits as its closed form says."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from verifypd import cli
from verifypd.bench.campaign import Folder
from verifypd.bench.figures import figures
from verifypd.bench.protocols import LLAMA
from verifypd.bench.simulated import NOISE, Simulated, device_costs, pair_costs, read_costs
from verifypd.bench.tuned import POLICIES
from verifypd.bench.workload import Arrival, Workload
from verifypd.control.architectures import Plain
from verifypd.control.controller import FixedController
from verifypd.control.cost import Coefficients, CostModel
from verifypd.errors import ConfigError
from verifypd.simulate.engine import Simulation
from verifypd.simulate.tables import h200
from verifypd.simulate.traffic import replay
from verifypd.simulate.world import Settings, TrueCosts


def test_a_simulated_queue_waits_as_its_closed_form_says() -> None:
    """M/D/1: one request at a time, each one pass of D s: the mean wait is load * D / (2 * (1 - load))."""
    noise, service, load, count = random.Random(3), 0.01, 0.7, 12_000
    costs = Coefficients(**dict.fromkeys(asdict(Coefficients()), 0.0) | {"base": service, "knee": 1e9})
    at, requests = 0.0, []
    for _ in range(count):
        at += noise.expovariate(load / service)
        requests.append((at, 8, 1))
    settings = Settings(batch_size=1, queue_factor=1.0, drafter=None)
    report = Simulation(
        Plain(FixedController(0), CostModel(costs)), replay(requests, 0.0), TrueCosts(costs), settings
    ).run()
    waits = [(each.last or 0.0) - each.arrival - service for each in report.outcomes]
    assert sum(waits) / count == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)
    assert min(waits) == pytest.approx(0.0, abs=1e-9)


def test_costs_of_other_gpus_and_pairs() -> None:
    ours = h200().coefficients
    assert device_costs("h200") == ours
    a100 = device_costs("a100")
    assert a100.base == pytest.approx(ours.base * 4.8 / 2.04) and a100.steep == pytest.approx(ours.steep * 989 / 312)
    assert a100.knee < ours.knee  # it computes less for what it reads
    big = pair_costs(ours, "tinyllama-1.1b:codellama-34b")
    assert 4.5 < big.base / ours.base < 5.5 and big.draft_step == pytest.approx(ours.draft_step)
    assert big.context < ours.context  # eight key heads, not thirty-two
    assert pair_costs(ours, LLAMA) == ours
    with pytest.raises(ConfigError, match="rtx4090"):
        device_costs("abacus")


def test_measured_costs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"coefficients": {"base": 0.02, "draft_step": 0.004}, "knee": None}))
    found = read_costs(file)
    assert (found.base, found.draft_step, found.steep, found.context) == (0.02, 0.004, 0.0, 0.0)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="costs --json"):
        read_costs(file)


def run(name: str, workload: Workload, seconds: float = 100.0, alpha: float = 0.7) -> Simulated:
    arm = Simulated(name, POLICIES[name], lambda _: device_costs("h200"), "h200", alpha, 4)

    async def play() -> None:
        await arm.prepare({"pair": LLAMA, "batch": 8, "requests": 16})
        arm.outcome = await arm.play(workload, seconds)  # type: ignore[attr-defined]

    asyncio.run(play())
    return arm


def burst(count: int = 16, output: int = 40) -> Workload:
    return Workload("burst", 0.0, tuple(Arrival(0.0, 64, output) for _ in range(count)))


def test_an_arm_plays_a_workload_and_keeps_its_books() -> None:
    drafting, plain = run("pdv pipelined", burst()), run("plain", burst())
    assert asyncio.run(plain.drafts()).spans == 0  # type: ignore[union-attr]
    drafts = asyncio.run(drafting.drafts())
    assert drafts is not None and 0.35 < sum(drafts.accepted) / drafts.tokens < 0.6
    assert drafts.drafted[0] == drafts.spans and sum(drafts.drafted) == drafts.tokens
    assert all(stood <= had for stood, had in zip(drafts.accepted, drafts.drafted, strict=True))
    counts = drafting.reading()
    assert counts["plans_left_n"] > 0.3 * counts["plans_n"] and counts["draft_s"] > 0 == plain.reading()["draft_s"]
    assert counts["chunks_s"] == 0 < counts["prefill_s"], "prompts have passes of their own"
    books = plain.reading()
    assert books["prefill_s"] == 0 < books["chunks_s"] < books["verify_s"]
    for arm in (drafting, plain):
        found = figures([arm.outcome])  # type: ignore[attr-defined]
        assert found["unfinished"] == 0 and found["output_tokens"] == 16 * 40
    again = run("pdv pipelined", burst())
    assert again.outcome == drafting.outcome  # type: ignore[attr-defined]
    stopped = run("plain", burst(), seconds=0.1).outcome  # type: ignore[attr-defined]
    assert figures([stopped])["unfinished"] > 0 and stopped.seconds < 0.2
    assert NOISE > 0


def test_a_closed_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match="closed loop"):
        run("plain", replace(burst(), clients=2))


@pytest.mark.parametrize("protocol", ["sweep", "mixed"])
def test_every_table_and_plot_says_simulated(protocol: str, tmp_path: Path) -> None:
    arguments = ["--quick", "--seeds", "2", "--pair", LLAMA, "--arm", "plain", "--arm", "pdv", "--no-png"]
    traffic = ["--rate", "4", "--duration", "4"] if protocol == "mixed" else ["--concurrency", "64"]
    assert cli.main(["bench", "simulate", protocol, "--gpu", "a100", "--out", str(tmp_path), *arguments, *traffic]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["complete"] and found["note"].startswith("SIMULATED with the costs of a100")
    assert found["note"].endswith("requests arrive for 4 s") == (protocol == "mixed"), "a shorter run says so"
    assert all("(simulated)" in name for name in found["scenarios"])
    for name in ("report.html", "summary.md", "modes.md"):
        assert "SIMULATED" in (tmp_path / name).read_text()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure") == page.count("[SIMULATED") > 4, "every picture says so"


def test_the_same_command_gives_the_same_figures(tmp_path: Path) -> None:
    """In another folder; the reference has other chances in its second run, else A/A would say nothing."""
    command = ["bench", "simulate", "three-way", "--quick", "--pair", LLAMA, "--arm", "plain", "--arm", "pdv pipelined"]
    more = ["--reference", "pdv pipelined", "--num-requests", "20", "--seed", "4", "--seeds", "2", "--no-png"]
    runs = []
    for name in "ab":
        assert cli.main([*command, *more, "--out", str(tmp_path / name)]) == 0
        runs.append({(cell.arm, cell.seed): (cell.outcome, cell.drafts) for cell in Folder(tmp_path / name).cells()})
    assert runs[0] == runs[1] and len(runs[0]) == 6
    assert runs[0]["pdv pipelined", 4] != runs[0]["pdv pipelined again", 4]


def test_targets_reach_the_policy_and_the_figures(tmp_path: Path) -> None:
    command = ["bench", "simulate", "mixed", "--size", "full", "--rate", "24", "--duration", "4", "--arm", "auto"]
    found = []
    for name, own in (("default", []), ("tight", ["--slo-ttft", "100", "--slo-tpot", "5"])):
        assert cli.main([*command, *own, "--out", str(tmp_path / name), "--seeds", "1", "--no-png"]) == 0
        found.append(json.loads((tmp_path / name / "results.json").read_text()))
    assert [each["targets"] for each in found] == [{"ttft": 0.5, "tpot": 0.015}, {"ttft": 0.1, "tpot": 0.005}]
    assert "slo_ttft" not in found[0]["arms"]["auto"]["spec"] and found[1]["arms"]["auto"]["spec"]["slo_tpot"] == 5
    figures = [next(iter(each["scenarios"].values()))["arms"]["auto"]["figures"] for each in found]
    assert figures[0]["tpot_ms_p95"] != figures[1]["tpot_ms_p95"], "it plans otherwise"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "--slo-ttft", "-1"], "--slo-ttft must be above 0"),
        (
            ["three-way", "--max-concurrent", "2"],
            "a simulated engine takes requests in, and ends them, alone: leave out",
        ),
        (["mixed", "--request-timeout", "3"], "leave out --request-timeout"),
        (["sweep", "--source", "chat"], "leave out --source"),
        (["sweep", "--rate", "4"], "leave out --rate"),
        (["sweep", "--replicas", "4", "--surge", "2"], "leave out --replicas, --surge"),
        (["sweep", "--max-replicas", "3"], "`simulate cluster`, not sweep: leave out --max-replicas"),
        (["mixed", "--concurrency", "4"], "leave out --concurrency"),
        (["sweep", "--quick", "--size", "full"], "leave out --quick"),
        (["three-way", "--duration", "4"], "leave out --duration"),
        (["sweep", "--duration", "4", "--num-requests", "4"], "leave out --duration"),
        (["cluster", "--num-requests", "4", "--cut-off", "3"], "leave out --num-requests, --cut-off"),
        (["cluster", "--rate", "4", "--rate-each", "2"], "leave out --rate-each"),
        (["cluster", "--pace", "x", "--alpha", "0.5"], "--pace says how fast replicas are: leave out --alpha"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "simulate", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_complete_run_that_is_asked_for_again_stays_as_it_is(tmp_path: Path) -> None:
    command = ["bench", "simulate", "three-way", "--quick", "--pair", LLAMA, "--arm", "plain", "--num-requests", "5"]
    found = []
    for seeds in ("1", "1", "2"):
        assert cli.main([*command, "--out", str(tmp_path), "--no-png", "--seeds", seeds]) == 0
        found.append(json.loads((tmp_path / "results.json").read_text()))
    assert found[0] == found[1], "nothing ran, so no sitting is added"
    assert [len(each["sittings"]) for each in found] == [1, 1, 2]


def test_seeds_join_a_sweep_however_many_requests_they_bring(tmp_path: Path) -> None:
    """More come with the second seed than with the first."""
    command = ["bench", "simulate", "sweep", "--quick", "--pair", LLAMA, "--concurrency", "16", "--no-png"]
    arms = ["--arm", "pd", "--arm", "pdv pipelined", "--out", str(tmp_path), "--seed", "1"]
    assert cli.main([*command, *arms, "--seeds", "1"]) == 0
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert cli.main([*command, *arms, "--seeds", "2"]) == 0
    cells = {(cell.seed, cell.arm): cell.outcome.wanted for cell in Folder(tmp_path).cells()}
    assert set(cells) == {(seed, arm) for seed in (1, 2) for arm in ("pd", "pd again", "pdv pipelined")}
    assert cells[1, "pd"] < cells[2, "pd"]
    assert len(written) == 3 and {path: path.stat().st_mtime_ns for path in written} == written, "none ran again"
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["complete"] and found["seeds"] == [1, 2] and len(found["sittings"]) == 2


def test_arms_of_other_batches_need_no_reference_of_the_protocol(tmp_path: Path) -> None:
    arms = [
        "--arm",
        "pdv batch 64",
        "--arm",
        "pdv batch 8",
        "--rate",
        "8",
        "--duration",
        "3",
        "--seeds",
        "2",
        "--no-png",
    ]
    assert cli.main(["bench", "simulate", "mixed", "--out", str(tmp_path), *arms]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["reference"] == "pdv batch 64"
    [own] = found["scenarios"].values()
    assert own["compared"]["pdv batch 8"]["e2e_ms_mean"]["ratio"] > 1.0, "eight at once are too few"


def test_a_small_verify_batch_pipelines_where_few_requests_run() -> None:
    """Three at once, batch 8: `pdv` waits for twice its two."""
    few = burst(3)
    left = {name: run(name, few).reading()["plans_left_n"] for name in ("pdv", "pdv verify 1", "pd")}
    assert left["pdv"] == left["pd"] == 0 < left["pdv verify 1"]


def test_the_table_knows_the_size_of_the_verifier() -> None:
    """Five to 31 requests: `pd` up to 7 GB, `pdv` beyond."""
    costs = device_costs("h200")
    for pair, gigabytes in (
        ("tinyllama-1.1b:tinyllama-1.1b", 2.2),
        (LLAMA, 13.5),
        ("tinyllama-1.1b:codellama-34b", 67),
    ):
        arm = Simulated("table", POLICIES["table"], lambda _: costs, "h200", 0.68, 4)
        asyncio.run(arm.prepare({"pair": pair, "batch": 8, "requests": 8}))
        assert arm.world(8)[1].verifier_bytes / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_a_folder_of_several_runs_is_done_part_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `bench all` writes it: no run.json at its top."""
    common = ["--quick", "--pair", LLAMA, "--arm", "plain", "--arm", "pd", "--seeds", "2", "--no-png"]
    made = [tmp_path / "three-way", tmp_path / "sweep"]
    for part in made:
        assert cli.main(["bench", "simulate", part.name, "--out", str(part), *common]) == 0
        (part / "report.html").unlink()
        (part / "modes.md").unlink()
    heads = [json.loads((part / "run.json").read_text()) for part in made]
    for head, part, date in zip(heads, made, ("2026-01-01", "2026-01-02"), strict=True):
        head["sittings"][0]["date"] = date
        (part / "run.json").write_text(json.dumps(head))
    capsys.readouterr()
    assert cli.main(["bench", "modes", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.index(str(made[0])) < printed.index(str(made[1])) and printed.count("# Why arms win and lose") == 2
    assert cli.main(["bench", "report", str(tmp_path), "--no-png"]) == 0
    assert all((part / name).exists() for part in made for name in ("report.html", "modes.md"))
    index = (tmp_path / "index.html").read_text()
    assert 0 < index.index("three-way/report.html") < index.index("sweep/report.html")
    assert cli.main(["bench", "report", str(tmp_path), "--small", str(tmp_path / "small.json")]) == 2
    assert f"give one of the folders {made[0]}, {made[1]}" in capsys.readouterr().err
    for command in ("report", "modes"):
        assert cli.main(["bench", command, str(made[0] / "cells")]) == 2
        assert "nor in the folders within it" in capsys.readouterr().err


def test_a_deeper_queue_admits_more_requests() -> None:
    costs = device_costs("h200")
    for depth, slots in ((1.0, 4), (1.2, 5), (2.0, 8)):
        arm = Simulated("pdv", POLICIES[f"pdv queue {depth:g}"], lambda _: costs, "h200", 0.68, 4)
        assert arm.world(4)[1].slots == slots


def test_low_concurrency_is_judged_over_baseline_beside_another_reference(tmp_path: Path) -> None:
    arms = [word for name in ("plain", "pd", "baseline", "pdv verify 1") for word in ("--arm", name)]
    command = ["bench", "simulate", "three-way", "--quick", "--pair", LLAMA, "--num-requests", "2,3", "--seeds", "3"]
    assert cli.main([*command, *arms, "--reference", "plain", "--no-png", "--out", str(tmp_path)]) == 0
    scenarios = json.loads((tmp_path / "results.json").read_text())["scenarios"]
    assert all({"pd", "pdv verify 1"} <= set(each["over_baseline"]) for each in scenarios.values())
    [line] = [line for line in (tmp_path / "modes.md").read_text().splitlines() if line.startswith("| low concurrency")]
    assert "slower than baseline" in line and "not measured" not in line
