"""Comparisons without a browser: arms, the limits of a load, and how runs are labelled and kept."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from verifypd.bench.campaign import Folder, Scenario, Watch, plan_of
from verifypd.bench.figures import Targets
from verifypd.bench.play import Limits
from verifypd.bench.workload import Arrival, Workload
from verifypd.cli import main
from verifypd.errors import ConfigError
from verifypd.watch import arms, replay
from verifypd.watch.arms import Server, Started
from verifypd.watch.compare import Compared, labelled, verdict
from verifypd.watch.load import Bounds, Load

NAMES = {"arch": "arch", "max_draft": "max_draft", "model": "model"}


def test_arms_are_architectures_and_servers() -> None:
    texts = ["pdv", "pd:max_draft=2", "http://127.0.0.1:9/v1", "vllm=http://127.0.0.1:9"]
    pdv, pd, url, named = arms.parse(texts, {"model": "smollm2"}, NAMES, "key")
    assert isinstance(pdv.arm, Started) and pdv.spec["settings"]["arch"] == "pdv"
    assert pd.spec["settings"] == {"model": "smollm2", "arch": "pd", "max_draft": 2}
    assert isinstance(url.arm, Server) and url.name == "127.0.0.1:9" and url.arm.where == ("http://127.0.0.1:9", "key")
    assert named.name == "vllm" and "key" not in json.dumps(named.spec), "no secret is written down"
    with pytest.raises(ConfigError, match="no URL and no architecture; choose from plain"):
        arms.parse(["pvd"], {}, NAMES, None)
    with pytest.raises(ConfigError, match="max-draft"):
        arms.parse(["pd:max_draft=-2"], {}, NAMES, None)


def test_runs_at_the_same_time_say_so() -> None:
    scenario = Scenario("chat", (Workload("w", 0.0, (Arrival(0.0, 5, 5),)),))
    assert labelled(scenario, together=False) is scenario
    assert labelled(scenario, together=True).name == "chat, all at the same time"


@pytest.fixture
def load() -> Load:
    return Load("prompts", 5.0, Bounds(20.0, 3, 50), 4, plain_text=False)


@pytest.mark.parametrize(
    "wrong",
    [*({"rate": rate} for rate in (21, -1, float("nan"), "5", True)), {"mix": "x"}, {"burst": 1}, {"x": 1}],
)
def test_a_load_keeps_to_its_limits(load: Load, wrong: dict[str, Any]) -> None:
    assert load.change({"mix": "chat", **wrong}) is not None
    assert (load.rate, load.mix) == (5.0, "prompts"), "nothing of a wrong change counts"


def test_a_load_changes_while_it_runs(load: Load) -> None:
    async def drawn() -> list[Arrival]:
        found = []
        async for arrival in load.arrivals(1.2, random.Random(1)):
            found.append(arrival)
            if len(found) == 1:
                assert load.change({"rate": 20, "mix": "chat", "burst": True}) is None
        return found

    found = asyncio.run(drawn())
    long = [arrival for arrival in found if arrival.prompt_tokens == 50 and arrival.output_tokens == 16]
    assert len(long) == 3 and len({arrival.at for arrival in long}) == 1, "a burst comes at once"
    assert found[0].prompt or found[0].messages, "it began with prompts"
    chat = [arrival for arrival in found[1:] if arrival not in long]
    assert len(chat) > 8 and all(arrival.output_tokens == 4 and arrival.prompt_tokens for arrival in chat)
    assert [arrival.at for arrival in found] == sorted(arrival.at for arrival in found)


@pytest.mark.slow
@pytest.mark.parametrize("turns", [[], ["--together"]])
def test_strangers_are_compared_to_the_report(
    stranger: str, tmp_path: Path, turns: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--seeds", "2", "--rate", "30", "--duration", "0.5", "--output-tokens", "5", "--source", "chat", "--end"]
    arguments = [f"one={stranger}", f"two={stranger}", "--out", str(tmp_path), "--port", "0", *given, *turns]
    assert main(["compare", *arguments]) == 0
    said = capsys.readouterr().out
    assert "watch it at http://127.0.0.1:" in said and "report:" in said
    [scenario] = Folder(tmp_path).head["scenarios"]
    assert scenario.endswith(", all at the same time") == bool(turns)
    cells = Folder(tmp_path).cells()
    assert len(cells) == (4 if turns else 6), "in turns the first arm runs twice, against itself"
    assert all(record.finished for cell in cells for record in cell.outcome.records)
    assert {cell.workload for cell in cells if cell.seed == 0} == {cells[0].workload}, "all got the same arrivals"
    assert "mean time of a request of two over one" in said
    shown = replay.show([tmp_path])
    events = shown.events.since(0)
    assert [arm.name for arm in shown.arms] == ["one", "two"] and events[-1]["state"] == "done"
    assert events[-1]["verdict"] == verdict(json.loads((tmp_path / "results.json").read_text()))
    running = [set(event["now"]) for event in events if event["now"]]
    assert ({"0", "1"} in running) == bool(turns), "in turns no two run at once"
    assert any(frame["metrics"]["vllm:kv_cache_usage_perc"] == 0.25 for frame in shown.arms[0].frames.since(0))


def test_what_cannot_be_compared_is_refused(stranger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "x"), "--port", "0"]
    for arguments, words in (
        ([stranger], "two arms or more"),
        ([f"a={stranger}", f"b={stranger}", "--control"], "--control needs a key"),
        ([f"a={stranger}", f"b={stranger}", "--control", "--control-key", "k", "--burst", "x"], "is not NxTOKENS"),
        ([f"a={stranger}", f"a={stranger}"], "same name"),
        ([f"a={stranger}", f"b={stranger}", "--rate", "0"], "--rate must be above 0"),
    ):
        assert main(["compare", *arguments, *out]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x" / replay.WATCHED).exists()


def test_tokens_of_now_are_those_the_server_counts() -> None:
    tally = arms.Tally(begun=10.0, ended=None, recent=[(11.9, 1)] * 4)
    assert tally.rate(12.0) == 2.0, "outputs stand for tokens where nobody counts"
    tally.counted = [(10.2, 100.0), (11.0, 120.0), (12.0, 150.0)]
    assert tally.rate(12.0) == pytest.approx(50 / 1.8) and tally.mean(12.0) == 25.0
    tally.tokens, tally.ended = 60, 12.0
    assert tally.mean(15.0) == 30.0, "in the end every request has said how many it had"


def test_the_speed_of_an_arm_whose_engine_was_started_again_is_not_negative() -> None:
    show = arms.Shown(arms.Server("http://127.0.0.1:9", None))
    show.tally = arms.Tally(begun=0.0, ended=None)
    for tokens in (1000.0, 1100.0, 30.0, 80.0):
        show.count({arms.TOKENS: tokens})
    assert [tokens for _, tokens in show.tally.counted] == [1000, 1100, 1130, 1180]
    assert show.tally.mean(10.0) == 18.0


class Parrot:
    """An arm in this process that notes what it is asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: dict[str, Any] = {}
        self.heard: list[tuple[Any, int]] = []

    async def start(self) -> dict[str, Any]:
        return {}

    async def ask(self, arrival: Arrival, seed: int, answer: Any) -> None:
        prompt = arrival.messages or arrival.text_or_ids(seed, None)
        self.heard.append((json.dumps(prompt), arrival.output_tokens))
        for _ in range(arrival.output_tokens):  # token by token: a warm-up refuses an answer that comes whole
            answer.came(1)
        answer.ended(arrival.output_tokens, 1)

    async def drafts(self) -> None:
        return None

    async def close(self) -> None:
        """Nothing is held."""


def test_who_comes_after_a_steered_run_gets_the_same_requests(tmp_path: Path, load: Load) -> None:
    one, two = Parrot("one"), Parrot("two")
    scenario = Scenario("steered", (Workload("w", 0.0, (Arrival(0.0, 5, 5),)),))
    folder = Folder(tmp_path)
    folder.begin(plan_of([one, two], [scenario], [0], Targets(1.0, 1.0), None), {})
    campaign = Compared(folder, [one, two], [scenario], [0], limits=Limits(), files="x", control=None)
    campaign.load, campaign.seconds = load, 0.6
    begun: list[tuple[list[str], bool]] = []
    campaign.prepare(lambda turns, steered: begun.append(([turn.label for turn in turns], steered)))
    assert load.change({"rate": 20, "mix": "chat", "burst": True}) is None  # random words: their seeds must agree too
    asyncio.run(campaign.run(Watch()))
    assert begun == [(["one"], True), (["two"], False)] and campaign.errors == []
    asked = [sorted(arm.heard[1:]) for arm in (one, two)]  # the first is the warm-up
    assert asked[0] == asked[1] and len(asked[0]) > 5
    cells = folder.cells()
    assert cells[0].workload == cells[1].workload != scenario.workloads[0].digest
