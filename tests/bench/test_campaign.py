"""Campaigns: every arm gets the same work in turns, what was done is not done again, and a part of it is a report."""

from __future__ import annotations

import asyncio
import csv
import gc
import itertools
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from verifypd.bench import charts, pictures, report
from verifypd.bench.arrivals import Process, make
from verifypd.bench.campaign import AGAIN, Campaign, Folder, Scenario, Turn, Watch, plan_of
from verifypd.bench.figures import Targets
from verifypd.bench.play import Answer, Drafts, Limits
from verifypd.bench.results import HEADER, results, row
from verifypd.bench.sources import source
from verifypd.bench.statistics import COMPARED, NONE
from verifypd.bench.workload import Arrival, Workload, read
from verifypd.errors import ConfigError, VerifyPDError

SITTING = {
    "command": "verifypd bench run", "commit": "c" * 40, "modified": False, "files": "tracked:0", "date": "2026-01-01",
    "gpu": None, "cpu": "a <CPU>",
}  # fmt: skip
SEEDS = [0, 1]


@dataclass
class Pacer:
    """An arm that answers at a steady pace: `step` s a token."""

    name: str
    step: float = 0.001
    fails: bool = False
    asked: list[Arrival] = field(default_factory=list)
    started: int = 0
    closed: int = 0

    @property
    def spec(self) -> dict[str, Any]:
        return {"step": self.step}

    async def start(self) -> dict[str, Any]:
        self.started += 1
        return {"pace": self.step}

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        self.asked.append(arrival)
        if self.fails:
            raise VerifyPDError("no")
        for _ in range(arrival.output_tokens):
            await asyncio.sleep(self.step)
            answer.came(1)
        answer.ended(arrival.output_tokens, arrival.prompt_tokens)

    async def drafts(self) -> Drafts | None:
        return Drafts(len(self.asked), 3 * len(self.asked), (2 * len(self.asked) // 3, len(self.asked) // 3))

    async def pauses(self) -> dict[str, float] | None:
        """One collection a request, which is said of arms that are so named."""
        return {"collected": len(self.asked), "collected_ms": 0.5 * len(self.asked)} if "tell" in self.name else None

    async def close(self) -> None:
        self.closed += 1


def scenarios(output: int = 4) -> list[Scenario]:
    chosen = source(f"fixed:10x{output}")
    return [
        Scenario(process.name, tuple(make(chosen, process, seed, count=6) for seed in SEEDS))
        for process in (Process(clients=2), Process(rate=200.0))
    ]


def campaign(folder: Path, arms: list[Pacer], seeds: list[int] = SEEDS, output: int = 4, **options: Any) -> Campaign:
    kept = Folder(folder)
    work = scenarios(output)
    control = options.pop("control", arms[0].name)
    made = Campaign(kept, arms, work, seeds, limits=Limits(10.0, 10.0), files="tracked:0", control=control)
    kept.begin(plan_of(arms, work, seeds, Targets(), control), SITTING if made.left() else None)
    return made


class Order(Watch):
    def __init__(self, stop_after: int | None = None) -> None:
        self.turns: list[tuple[str, int, str]] = []
        self.stop_after = stop_after

    def begin(self, turn: Turn, done: int, total: int) -> None:
        if done == self.stop_after:
            raise KeyboardInterrupt
        self.turns.append((turn.scenario.name, turn.index, turn.label))


def test_arms_take_turns_on_the_same_requests(tmp_path: Path) -> None:
    one, two, order = Pacer("one"), Pacer("two", 0.002), Order()
    made = campaign(tmp_path, [one, two])
    asyncio.run(made.run(order))
    assert (one.started, one.closed, two.started, two.closed) == (1, 1, 1, 1)
    rounds = [order.turns[i : i + 3] for i in range(0, len(order.turns), 3)]
    assert len(rounds) == 4  # two seeds of two scenarios
    assert all({label for _, _, label in each} == {"one", "one again", "two"} for each in rounds)
    assert all(len({(name, seed) for name, seed, _ in each}) == 1 for each in rounds)
    assert len({each[0][2] for each in rounds}) > 1, "every arm is first now and then"
    cells = made.folder.cells()
    for seed in SEEDS:
        due = {
            c.arm: [r.due for r in c.outcome.records] for c in cells if c.scenario == "poisson 200/s" and c.seed == seed
        }
        assert due["one"] == due["two"] == due["one again"]
        assert due["one"] == pytest.approx([a.at for a in scenarios()[1].workloads[seed].arrivals], abs=1e-6)
    assert len({c.workload for c in cells}) == 4


def test_no_arm_always_follows_the_same_one(tmp_path: Path) -> None:
    """The second run of the control neither; the order is the same when a run is resumed."""
    arms, seeds = [Pacer(name) for name in ("one", "two", "three")], [0, 1, 2]
    work = [Scenario(f"closed {n}", scenarios()[0].workloads) for n in (1, 8, 32)]

    def labels() -> list[str]:
        planned = Campaign(Folder(tmp_path), arms, work, seeds, limits=Limits(), files="", control="one")
        return [turn.label for turn in planned.turns()]

    order = labels()
    assert order == labels()
    before: dict[str, set[str]] = {}
    for start in range(0, len(order), 4):
        for earlier, later in itertools.pairwise(order[start : start + 4]):
            before.setdefault(later, set()).add(earlier)
    names = {"one", "two", "three", "one again"}
    assert before == {name: names - {name} for name in names}


def test_workloads_are_kept_and_read_back(tmp_path: Path) -> None:
    asyncio.run(campaign(tmp_path, [Pacer("one")]).run(Watch()))
    files = sorted((tmp_path / "workloads").glob("*.json"))
    assert len(files) == 4
    assert {read(path).digest for path in files} == {w.digest for s in scenarios() for w in s.workloads}


def test_what_was_done_is_not_done_again(tmp_path: Path) -> None:
    one, two = Pacer("one"), Pacer("two")
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(campaign(tmp_path, [one, two]).run(Order(stop_after=5)))
    assert one.closed == two.closed == 1
    found = report.write(tmp_path, pictures=False)
    assert not found["complete"] and found["cells"] == {"run": 5, "planned": 12}
    assert "5 of 12 runs" in (tmp_path / "report.html").read_text()
    assert "Partial" in (tmp_path / "summary.md").read_text()
    order = Order()
    asyncio.run(campaign(tmp_path, [one, two]).run(order))
    assert len(order.turns) == 7
    assert report.write(tmp_path, pictures=False)["complete"]
    fresh = Pacer("one"), Pacer("two")
    asyncio.run(campaign(tmp_path, list(fresh)).run(order))
    assert fresh[0].started == 0, "nothing is left: no arm is started"
    assert len(Folder(tmp_path).head["sittings"]) == 2, "nor is that a sitting"


def test_what_held_up_steps_is_kept_by_cell(tmp_path: Path) -> None:
    """Warm-ups do not count."""
    asyncio.run(campaign(tmp_path, [Pacer("telling"), Pacer("silent")], control=None).run(Watch()))
    told = {(cell.arm, len(cell.outcome.records)): cell.pauses for cell in Folder(tmp_path).cells()}
    assert told == {("telling", 6): {"collected": 6, "collected_ms": 3.0}, ("silent", 6): None}
    found = report.write(tmp_path, pictures=False)
    report.write_small(tmp_path, tmp_path / "small.json")
    for each in (found, json.loads((tmp_path / "small.json").read_text())):
        for scenario in each["scenarios"].values():
            assert scenario["arms"]["telling"]["pauses"] == {"collected": 12, "collected_ms": 6.0}
            assert scenario["arms"]["silent"]["pauses"] is None


def test_what_an_engine_counted_that_died_meanwhile_is_not_known(tmp_path: Path) -> None:
    """Our server's goes on with a new one, whose count begins at nothing: less than before is no figure."""

    class Frail(Pacer):
        async def drafts(self) -> Drafts | None:
            return Drafts(100 - len(self.asked), 300, (90,))

        async def pauses(self) -> dict[str, float] | None:
            return {"collected": 100 - len(self.asked), "collected_ms": 5.0}

    made = campaign(tmp_path, [Frail("frail")], control=None)
    asyncio.run(made.run(Watch()))
    assert len(made.folder.cells()) == 4
    assert all(cell.drafts is None and cell.pauses is None for cell in made.folder.cells())
    assert report.write(tmp_path, pictures=False)["complete"]


def test_no_collection_of_the_client_looks_like_a_pause_of_the_arm(tmp_path: Path) -> None:
    """What lives before a run, nearly all of the heap, is left out of collections during it, and only then."""
    frozen: list[int] = []

    class Looking(Pacer):
        async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
            frozen.append(gc.get_freeze_count())
            await super().ask(arrival, seed, answer)

        async def drafts(self) -> Drafts | None:
            assert gc.get_freeze_count() == 0, "between runs all is collected: models may have to go"
            return await super().drafts()

    asyncio.run(campaign(tmp_path, [Looking("one")]).run(Watch()))
    assert len(frozen) > 24 and min(frozen) > 10_000 and gc.get_freeze_count() == 0


def test_arms_and_seeds_may_join(tmp_path: Path) -> None:
    asyncio.run(campaign(tmp_path, [Pacer("one")], [0]).run(Watch()))
    order = Order()
    asyncio.run(campaign(tmp_path, [Pacer("one"), Pacer("two")]).run(order))
    assert len(order.turns) == 8  # `one` and `one again` had seed 0 of both scenarios
    found = report.write(tmp_path, pictures=False)
    assert found["complete"] and list(found["arms"]) == ["one", "two"] and found["seeds"] == SEEDS


def test_an_arm_is_told_of_the_requests_of_each_workload(tmp_path: Path) -> None:
    """Unless its scenario says how many. Seeds that bring more may join, for the arm is the same."""

    class Told(Pacer):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.told: list[dict[str, Any]] = []

        async def prepare(self, settings: dict[str, Any]) -> dict[str, Any]:
            self.told.append(settings)
            return {}

    arm, chosen = Told("one"), source("fixed:10x4")
    counts = {0: 3, 1: 6}
    for seeds in ([0], [0, 1]):
        workloads = tuple(make(chosen, Process(rate=200.0), seed, count=counts[seed]) for seed in seeds)
        work = [Scenario("open", workloads, None, {"batch": 2})]
        work.append(Scenario("said", workloads, None, {"batch": 2, "requests": 64}))
        kept = Folder(tmp_path)
        made = Campaign(kept, [arm], work, seeds, limits=Limits(10.0, 10.0), files="tracked:0", control=None)
        kept.begin(plan_of([arm], work, seeds, Targets(), None), SITTING)
        asyncio.run(made.run(Watch()))
    expected = [{"batch": 2, "requests": count} for count in (3, 64, 6, 64)]
    assert arm.told == expected and len(Folder(tmp_path).cells()) == 4


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    asyncio.run(campaign(tmp_path, [Pacer("one")]).run(Watch()))
    with pytest.raises(ConfigError, match="other settings"):
        campaign(tmp_path, [Pacer("one", 0.5)]).left()
    with pytest.raises(ConfigError, match="other settings"):
        campaign(tmp_path, [Pacer("one")], output=5).left()
    with pytest.raises(ConfigError, match="other targets"):
        Folder(tmp_path).begin(plan_of([Pacer("one")], scenarios(), SEEDS, Targets(1.0, 1.0), None), SITTING)
    with pytest.raises(ConfigError, match="the same name"):
        campaign(tmp_path, [Pacer("one"), Pacer("one")])


def test_two_workloads_of_one_name_are_refused(tmp_path: Path) -> None:
    """The second would be kept in the place of the first."""
    with pytest.raises(ConfigError, match="two workloads are called"):
        Campaign(Folder(tmp_path), [Pacer("one")], [*scenarios(), *scenarios()[:1]], SEEDS, limits=Limits(10.0, 10.0),
                 files="tracked:0", control=None)  # fmt: skip


@pytest.mark.parametrize("name", ["summary.md", "cells"])
def test_what_lies_in_a_folder_is_not_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds {name} of something else"):
        Folder(tmp_path).begin(plan_of([Pacer("one")], scenarios(), SEEDS, Targets(), None), SITTING)
    assert (tmp_path / name).read_text() == "mine"


def test_files_that_are_no_runs_are_named(tmp_path: Path) -> None:
    made = campaign(tmp_path, [Pacer("one")])
    asyncio.run(made.run(Watch()))
    [first, *_] = sorted((tmp_path / "cells").glob("*.json"))
    strange = json.dumps(json.loads(first.read_text()) | {"arm": "other"})
    for text, words in (("{}", "is no run"), ("[]", "is no run"), (strange, "of no arm")):
        first.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Folder(tmp_path).cells()
    (tmp_path / "run.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="none of a benchmark's"):
        Folder(tmp_path)


def test_a_run_that_goes_on_keeps_its_note(tmp_path: Path) -> None:
    plan = plan_of([Pacer("one")], scenarios(), SEEDS, Targets(), None)
    for more, note in (({"note": "random"}, "random"), ({}, "random"), ({"note": ""}, "")):
        Folder(tmp_path).begin(plan | more, SITTING)
        assert Folder(tmp_path).head["note"] == note


def test_prompts_bear_a_mark_that_caches_do_not_know(tmp_path: Path) -> None:
    """The second run of an arm has prompts of its own, as has every scenario and every folder."""
    text = Workload("w", 0.0, (Arrival(0.0, 0, 2, prompt="Hello"),), 1)
    marks: list[str] = []
    for name in ("x", "y"):
        arm = Pacer("one")
        kept = Folder(tmp_path / name)
        work = [Scenario("a", (text,) * 2), Scenario("b", (text,) * 2)]
        kept.begin(plan_of([arm], work, SEEDS, Targets(), "one"), SITTING)
        made = Campaign(kept, [arm], work, SEEDS, limits=Limits(5.0, 5.0), files="", control="one")
        asyncio.run(made.run(Watch()))
        marks += [a.prompt or "" for a in arm.asked if not (a.prompt or "").startswith("[warm]")]
    assert len(marks) == 16 == len(set(marks))
    assert all(re.fullmatch(r"\[[0-9a-f]{6}\] Hello", mark) for mark in marks)


def test_an_arm_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    made = campaign(tmp_path, [Pacer("good"), Pacer("bad", fails=True)])
    asyncio.run(made.run(Watch()))
    assert len(made.errors) == 4 and "bad answers no request: no" in made.errors[0]
    found = report.write(tmp_path, pictures=False)
    assert not found["complete"] and {c.arm for c in made.folder.cells()} == {"good", "good again"}


def test_a_run_without_an_answer_is_not_kept(tmp_path: Path) -> None:
    """A server that dies after its warm-up: when it is back, the same command runs what is missing."""
    arm = Pacer("one")

    class Death(Watch):
        def begin(self, turn: Turn, done: int, total: int) -> None:
            arm.fails = done == 3

    made = campaign(tmp_path, [arm], control=None)
    asyncio.run(made.run(Death()))
    assert len(made.errors) == 1 and "one answers no request: no" in made.errors[0]
    assert len(made.folder.cells()) == 3
    arm.fails, order = False, Order()
    asyncio.run(campaign(tmp_path, [arm], control=None).run(order))
    assert len(order.turns) == 1 and report.write(tmp_path, pictures=False)["complete"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with an arm whose name needs escaping, so much slower than the other that it shows on a busy machine."""
    folder = tmp_path_factory.mktemp("done")
    asyncio.run(campaign(folder, [Pacer("quick"), Pacer("slow<b>&", 0.015)], output=8).run(Watch()))
    return folder, report.write(folder, pictures=False)


def test_results_hold_what_a_report_shows(done: tuple[Path, dict[str, Any]]) -> None:
    folder, found = done
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(found))
    assert found["complete"] and found["reference"] == found["control"] == "quick"
    for scenario in found["scenarios"].values():
        assert set(scenario["arms"]) == {"quick", "quick" + AGAIN, "slow<b>&"}
        slow = scenario["arms"]["slow<b>&"]
        assert slow["figures"]["unfinished"] == slow["figures"]["failed"] == 0
        assert len(slow["curves"]["e2e"]) == 101 and sum(slow["histograms"]["e2e"]["counts"]) == 12
        assert set(slow["by_seed"]) == {"0", "1"}
        assert slow["drafts"]["by_place"][0] == pytest.approx(2 / 3, abs=0.2)
        assert 0.2 < slow["drafts"]["acceptance_rate"] < 0.5
        assert set(scenario["compared"]) == {"slow<b>&"} and set(scenario["itself"]) == set(COMPARED)
        assert scenario["compared"]["slow<b>&"]["e2e_ms_mean"]["ratio"] > 2
    assert found["headline"] == "e2e_ms_mean"  # one of the two is an open loop
    won = found["won_and_lost"]["slow<b>&"]["tpot_ms_p50"]
    assert sum(won.values()) == 2 and won["faster"] == 0


def test_the_page_is_whole_and_asks_nobody(done: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = done
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert not re.search(r"https?://|<script|<link|url\(", page)
    assert "slow&lt;b&gt;&amp;" in page and "slow<b>" not in page and "a &lt;CPU&gt;" in page
    for words in (
        "Throughput",
        "Goodput",
        "Latency and throughput",
        "Histograms",
        "quick ran twice",
        "prefers-color-scheme",
    ):
        assert words in page, words
    assert page.count("<svg") == 9 + 2 * 8  # over all scenarios; curves and histograms of each
    assert "nan" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL).lower()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no browser here: apt-get install chromium")
def test_the_page_in_a_browser(done: tuple[Path, dict[str, Any]]) -> None:
    """It fits a wide and a narrow window, is dark where that is wanted, and loads nothing but itself."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
    seen: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for width, scheme, back in ((1240, "light", "rgb(255, 255, 255)"), (400, "dark", "rgb(13, 17, 23)")):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page.on("request", lambda request: seen.append(request.url))
            page.on("console", lambda message: seen.append(message.text))
            page.goto((done[0] / "report.html").as_uri())
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == back
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("[...document.querySelectorAll('details[open] svg')].every(e => e.clientHeight > 100)")
        browser.close()
    assert seen == [(done[0] / "report.html").as_uri()] * 2


def test_tables(done: tuple[Path, dict[str, Any]]) -> None:
    folder, found = done
    lines = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [(line["scenario"], line["arm"]) for line in lines][:3] == [
        ("closed 2", "quick"), ("closed 2", "quick again"), ("closed 2", "slow<b>&"),
    ]  # fmt: skip
    assert float(lines[0]["tok_s"]) == found["scenarios"]["closed 2"]["arms"]["quick"]["figures"]["tok_s"]
    assert lines[2]["tok_s_over_reference_verdict"] in ("slower", NONE) and lines[0]["tok_s_over_reference_ratio"] == ""
    summary = (folder / "summary.md").read_text()
    assert "| quick |" in summary and "Scenarios won and lost" in summary and "ccccc" in summary


def test_figures_say_of_how_many_requests_they_are(done: tuple[Path, dict[str, Any]]) -> None:
    """A load of one request is known as such."""
    folder, found = done
    shown = dict(zip(HEADER, row("quick", found["scenarios"]["closed 2"]["arms"]["quick"]), strict=True))
    assert (shown["requests"], shown["unfinished"], shown["failed"]) == ("12", "0", "0")
    assert "<th>requests</th>" in (folder / "report.html").read_text()


def test_all_latencies_are_in_a_table_of_each_scenario(done: tuple[Path, dict[str, Any]]) -> None:
    folder, found = done
    page, summary = ((folder / name).read_text() for name in ("report.html", "summary.md"))
    assert page.count("<details><summary>All latencies") == summary.count("\nAll latencies") == 2
    for scenario in found["scenarios"].values():
        for own in scenario["arms"].values():
            f, parts = own["figures"], ("mean", "p50", "p95", "p99")
            for told in (
                " / ".join(f"{f[f'ttft_ms_{part}']:.0f}" for part in parts),
                " / ".join(f"{f[f'tpot_ms_{part}']:.1f}" for part in parts),
                " / ".join(f"{f[f'e2e_ms_{part}'] / 1e3:.2f}" for part in parts),
                " / ".join(f"{f[f'gap_ms_{part}']:.1f}" for part in (*parts, "max")),
            ):
                assert f"<td>{told}</td>" in page and f"| {told} |" in summary


def test_pictures_have_the_names_people_know(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, found = done
    made = {name: parts for name, parts, _ in report.pictures_of(found)}
    assert {"throughput_comparison", "latency_comparison", "acceptance_rate", "goodput", "frontier", "cdf-1"} <= set(
        made
    )
    heat = charts.improvement(found)
    assert heat is not None and heat.name == "improvement_heatmap" and heat.rows == ("slow<b>&",)
    pictures.draw_heatmap(tmp_path / "heat.png", heat)
    for name in ("latency_comparison", "frontier", "cdf-1"):
        pictures.draw_chart(tmp_path / f"{name}.png", made[name])
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_another_reference(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = done
    found = results(Folder(folder), "slow<b>&")
    assert set(found["scenarios"]["closed 2"]["compared"]) == {"quick"}
    with pytest.raises(ConfigError, match="none of the arms"):
        report.write(folder, "nobody")
    with pytest.raises(ConfigError, match=r"no run\.json"):
        report.write(tmp_path, pictures=False)
