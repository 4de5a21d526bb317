"""The original's protocols: what they send is what is written of them, and every arm runs on one loaded pair."""

from __future__ import annotations

import asyncio
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from verifypd import cli
from verifypd.bench import kept
from verifypd.bench.campaign import Folder
from verifypd.bench.pairs import ALPHA, Pair, pair
from verifypd.bench.protocols import MIXED, PDV, PROTOCOLS, SIZES, Wanted, wanted, wanted_mixed
from verifypd.bench.tuned import POLICIES, Engines, Tuned
from verifypd.bench.workload import read
from verifypd.engine.async_llm import AsyncLLM
from verifypd.errors import ConfigError, HubError

pytestmark = pytest.mark.xdist_group("protocols")  # one run of a protocol for all

FULL = SIZES["full"]
FIVE = ("throughput_comparison", "latency_comparison", "gpu_utilization", "acceptance_rate", "improvement_heatmap")


def of(command: str, size: str = "full", *loads: int, **more: Any) -> Wanted:
    return wanted(PROTOCOLS[command], SIZES[size], [Pair("a:b", "b", "a", dummy=True)], loads, **more)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_the_sweep_is_the_originals() -> None:
    made = of("sweep")
    assert [load.batch for load in made.points()] == [1, 2, 4, 6, 8, 10, 12, 16, 32, 64, 72, 84, 96, 128]
    assert made.tokens == 20
    for load in made.points():
        assert load.process.rate == pytest.approx(0.05 * load.batch)
        assert (load.seconds, load.cut) == (30.0, 60.0)
    [scenario] = of("sweep", "full", 64).scenarios([0])
    arrivals = scenario.workloads[0].arrivals
    assert 60 < len(arrivals) < 140 and max(a.at for a in arrivals) <= 30.0
    assert {a.output_tokens for a in arrivals} == {20}
    [lonely] = of("sweep", "full", 1).scenarios([3])
    assert len(lonely.workloads[0].arrivals) >= 1, "where none would come, one does"


def test_three_way_models_and_comprehensive_are_the_originals() -> None:
    three = of("three-way")
    assert [load.count for load in three.points()] == [1, 5, 20, 50]
    assert all(load.process.rate is None and load.batch == 4 for load in three.points()) and three.tokens == 100
    models = of("models")
    assert [(load.count, load.process.rate) for load in models.points()] == [(5, 2.0), (20, 5.0)]
    assert PROTOCOLS["models"].pairs == ("tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b", "gemma-2b:gemma-7b")
    every = of("comprehensive")
    assert [(load.count, load.process.rate, load.batch) for load in every.points()] == [
        (10, 3.0, 6), (10, 5.0, 6), (10, 10.0, 6),
    ]  # fmt: skip
    for name in ("three-way", "comprehensive"):
        assert {"baseline", "pd", "pdv whole", "pdv pipelined"} <= set(PROTOCOLS[name].arms)
    assert PROTOCOLS["three-way"].claims["P95, s, Baseline, PD and PDV"]["n=20"] == [113.6, 123.2, 95.7]


def test_smaller_sizes_keep_the_load_and_say_so() -> None:
    full, short = of("comprehensive"), of("comprehensive", "short")
    for load in short.points():
        same = next(each for each in full.points() if each.label == load.label)
        assert load.process.rate == 5 * same.process.rate and short.tokens == full.tokens // 5
    assert "scaled (short)" in short.note and "scaled" not in full.note
    assert of("sweep", "quick").tokens == 8


def test_every_arm_gets_the_same_arrivals() -> None:
    one, two = of("sweep", "short", 8).scenarios([0, 1]), of("sweep", "short", 8).scenarios([0, 1])
    assert [w.digest for w in one[0].workloads] == [w.digest for w in two[0].workloads]
    assert one[0].workloads[0].digest != one[0].workloads[1].digest


def test_pipelining_takes_half_the_batch_and_everybody() -> None:
    whole, half = POLICIES["pdv whole"], POLICIES["pdv pipelined"]
    assert whole.settings(4, 4)["verify_batch"] == 4 and half.settings(4, 4)["verify_batch"] == 2
    assert half.settings(6, 4)["verify_batch"] == 3 and half.admit_all and not whole.admit_all


def test_a_verify_batch_may_be_as_small_as_the_load() -> None:
    """`pdv` takes a quarter of the batch: in A and E it never fills, and one arm of each has a smaller one."""
    assert POLICIES["pdv verify 4"].settings(64, 4)["verify_batch"] == 4
    assert POLICIES["pdv verify 4"].settings(2, 4)["verify_batch"] == 2, "no more than the batch"
    assert "pdv verify 1" in PROTOCOLS["sweep"].arms and "pdv verify 4" in MIXED.arms
    assert set(PDV) <= set(POLICIES) and {
        arm for arm in (*MIXED.arms, *PROTOCOLS["models"].arms) if "pdv" in arm
    } < set(PDV)


@pytest.mark.parametrize(
    ("name", "arch", "controller"),
    [("unified", "unified", "fixed"), ("table", "table", "fixed"), ("threshold", "pd", "threshold")],
)
def test_other_policies_run_by_name(name: str, arch: str, controller: str) -> None:
    made = POLICIES[name].settings(8, 4)
    assert (made["arch"], made["controller"]) == (arch, controller) and "verify_batch" not in made


def test_random_weights_are_said_to_be(tmp_path: Path) -> None:
    small = pair("qwen2-1.5b:qwen2-7b", cuda=False)
    assert small.dummy and small.shrink == 8 and "random weights, shapes / 8" in small.note and "1/8" in small.label
    settings = small.settings(tmp_path)
    shape = json.loads((Path(settings["model"]) / "config.json").read_text())
    assert (shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]) == (448, 7, 19008)
    assert settings["synthetic_acceptance"] == ALPHA
    assert pair("built-in", cuda=False).note == ""
    with pytest.raises(ConfigError, match="verifypd models"):
        pair("a:b", cuda=False)


def test_a_token_fetches_what_random_weights_stand_in_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the original's --hf-token does; a plan fetches nothing, and a run without a token neither."""
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr("verifypd.bench.pairs._here", lambda: {"gemma-2b"})

    def pull(name: str, *, hf_token: str | None = None) -> None:
        asked.append((name, hf_token))
        if len(asked) == 2:
            raise HubError(f"{name} is gated")

    monkeypatch.setattr("verifypd.bench.pairs.pull", pull)
    run = ["models", "--pair", "gemma-2b:gemma-7b", "--pair", "qwen2-1.5b:gemma-7b", "--out", tmp_path / "out"]
    assert bench(*run, "--plan") == 0 and "random" in capsys.readouterr().out
    assert bench(*run, "--plan", "--hf-token", "T") == 0 and "random" not in capsys.readouterr().out
    assert not asked
    assert bench(*run, "--hf-token", "T") == 2 and "is gated" in capsys.readouterr().err
    assert asked == [("gemma-7b", "T"), ("qwen2-1.5b", "T")] and not (tmp_path / "out").exists()


# -- what runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a tiny verifier and a draft that agrees with it now and then."""
    base = tmp_path_factory.mktemp("pair")
    verifier = tiny("llama", base / "verifier", max_position_embeddings=512)
    draft = noisy_copy(verifier, base / "draft", 0.15)
    return ["--model", str(verifier), "--draft", str(draft), "--dtype", "float32", "--kv-memory", "32MB",
            "--source", "fixed:12x8", "--no-measure-costs"]  # fmt: skip


def bench(*arguments: str | Path) -> int:
    return cli.main(["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def three_way(engine: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Protocol B on the tiny pair: five requests at once, batch 4."""
    out = tmp_path_factory.mktemp("three")
    assert bench("three-way", "--out", out, "--quick", "--num-requests", "5", "--seeds", "2", *engine) == 0
    return out, json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_three_way_runs_and_pdv_pipelines_where_it_should(three_way: tuple[Path, dict[str, Any]]) -> None:
    _, found = three_way
    assert found["complete"] and list(found["scenarios"]) == ["B n=5"] and found["reference"] == "baseline"
    many = found["scenarios"]["B n=5"]["arms"]
    assert set(many) == {*PROTOCOLS["three-way"].arms, "baseline again"}
    for own in many.values():
        assert own["figures"]["unfinished"] == own["figures"]["failed"] == 0
        assert own["figures"]["output_tokens"] == 2 * 5 * 10
        assert sum(own["parts"]["shares"].values()) == pytest.approx(1.0, abs=0.02)
        assert own["parts"]["peaks"]["memory"] > own["parts"]["peaks"]["kv_memory"]
        assert min(own["parts"]["shares"][name] for name in ("prefill", "verify")) > 0, "all read prompts and decode"
    assert many["pdv pipelined"]["parts"]["peaks"]["kv_memory"] > 0
    left = {name: own["parts"]["totals"]["plans_left_n"] for name, own in many.items()}
    assert left["pdv whole"] == left["pd"] == left["plain"] == 0
    assert left["pdv pipelined"] > 0.2 * many["pdv pipelined"]["parts"]["totals"]["plans_n"]
    assert many["plain"]["drafts"] is None and many["pd"]["drafts"]["spans"] > 0
    assert many["plain"]["parts"]["totals"]["draft_s"] == 0 < many["pd"]["parts"]["totals"]["draft_s"]
    assert many["baseline"]["parts"]["totals"]["passes_n"] > many["pd"]["parts"]["totals"]["passes_n"]
    assert set(found["scenarios"]["B n=5"]["over_pd"]) >= {"pdv whole", "pdv pipelined"}


@pytest.mark.slow
def test_its_report_says_what_it_is(three_way: tuple[Path, dict[str, Any]]) -> None:
    out, found = three_way
    page, summary, modes = ((out / name).read_text() for name in ("report.html", "summary.md", "modes.md"))
    for text in (page, summary, modes):
        assert "scaled (quick)" in text
    assert "33.1 / 33.9 / 35.6" in page and "33.1 / 33.9 / 35.6" in summary  # as published
    assert page.count("<figure") == page.count(
        "scaled (quick): times and outputs / 10, outputs of 8 at least, fewer loads]"
    )
    assert "plans that left a draft" in summary and "Where the time went" in page
    assert "leave a draft for a later verify" in modes and "overhead valley" in modes
    for name in (*FIVE, "memory", "scenarios_won", "parts-0"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert found["protocol"]["letter"] == "B"


@pytest.mark.slow
def test_a_small_file_has_the_pictures_too(three_way: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, whole = three_way
    assert bench("report", out, "--small", tmp_path / "small.json", "--no-png") == 0
    small = json.loads((tmp_path / "small.json").read_text())
    assert (tmp_path / "small.json").stat().st_size < kept.LARGEST
    [full], [own] = (found["scenarios"].values() for found in (whole, small))
    for name, arm in own["arms"].items():
        assert arm["by_seed"] == full["arms"][name]["by_seed"], "with all digits"
        curve, bins = arm["curves"]["e2e"], arm["histograms"]["e2e"]
        assert len(curve) == 26 and curve[0] == pytest.approx(full["arms"][name]["curves"]["e2e"][0], rel=1e-3)
        assert len(bins["counts"]) == len(bins["edges"]) - 1 == 20
        assert sum(bins["counts"]) == sum(full["arms"][name]["histograms"]["e2e"]["counts"])
        assert len(arm["parts"]["timeline"]["at"]) <= kept.SAMPLES
    assert bench("report", tmp_path / "small.json", "--out", tmp_path / "again", "--no-png") == 0
    page = (tmp_path / "again" / "report.html").read_text()
    assert all(words in page for words in ("Share that took", "Histograms", "Requests by lane"))


@pytest.mark.slow
def test_a_protocol_goes_on_and_its_modes_are_told_again(
    engine: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["sweep", "--out", tmp_path, "--quick", "--concurrency", "32", "--arm", "pd", "--arm", "pdv", "--no-png"]
    assert bench(*common, "--num-requests", "4", "--seeds", "1", *engine) == 0
    capsys.readouterr()
    assert bench(*common, "--num-requests", "4", "--seeds", "2", *engine) == 0
    assert "3 of 6 runs are there already" in capsys.readouterr().err
    assert len(Folder(tmp_path).cells()) == 6
    assert bench("modes", tmp_path) == 0
    assert "Why arms win and lose" in capsys.readouterr().out
    assert bench(*common, "--num-requests", "5", "--seeds", "2", *engine) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_them_have_a_page_and_share_one_engine(
    engine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    class Counted(AsyncLLM):
        def __init__(self, **settings: Any) -> None:
            loaded.append(settings)
            super().__init__(**settings)

    monkeypatch.setattr("verifypd.engine.async_llm.AsyncLLM", Counted)
    traffic = ["--quick", "--seeds", "1", "--no-control", "--no-png", "--duration", "2", "--concurrency", "4"]
    arms = [
        word for name in ("plain", "pdv", "pdv verify 1", "unified", "table", "threshold") for word in ("--arm", name)
    ]
    assert bench("all", "--only", "comprehensive,sweep,mixed:2", "--out", tmp_path, *traffic, *arms, *engine) == 0
    assert len(loaded) == 1, "every protocol runs on the same loaded pair"
    page = (tmp_path / "index.html").read_text()
    found = {}
    for name in ("comprehensive", "sweep", "mixed"):
        assert f"{name}/report.html" in page
        found[name] = json.loads((tmp_path / name / "results.json").read_text())
        assert found[name]["complete"] and not sum(
            own["figures"]["unfinished"] for each in found[name]["scenarios"].values() for own in each["arms"].values()
        )
    assert list(found["sweep"]["scenarios"]) == ["A C=4"] and list(found["comprehensive"]["scenarios"]) == ["D C=10"]
    assert found["mixed"]["seeds"] == [0, 1] and found["sweep"]["seeds"] == [0]
    assert "requests arrive for 2 s" in found["sweep"]["note"], "a shorter sweep says so"
    assert "lengths / 32; requests arrive for 2 s" in found["mixed"]["note"]
    assert found["mixed"]["protocol"]["letter"] == "E"


def test_mixed_traffic_on_a_pair_is_that_of_the_files() -> None:
    made = wanted_mixed(FULL, [Pair("a:b", "b", "a", dummy=True)], (), 60.0)
    assert made.rates == (8, 16) and made.scale == 1 and made.longest > 4500
    eight, sixteen = made.scenarios([1])
    file = read(Path(__file__).resolve().parents[2] / "benchmarks" / "workloads" / "long-8-seed1.json")
    assert eight.workloads[0].arrivals == file.arrivals and sixteen.level == "16/s"
    first = wanted_mixed(FULL, made.pairs, (8,), 5.0).scenarios([1])[0].workloads[0].arrivals
    assert first == tuple(a for a in file.arrivals if a.at <= 5.0), "a shorter run is the beginning of a longer one"
    few = wanted_mixed(SIZES["quick"], made.pairs)
    assert few.rates == (2,) and "lengths / 32; requests arrive for 6 s" in few.note and few.longest < 200
    assert wanted_mixed(FULL, made.pairs, (), 1.5).note.endswith("requests arrive for 1.5 s")
    assert "arrive" not in wanted_mixed(FULL, made.pairs).note, "that is the protocol's own time"
    with pytest.raises(ConfigError, match="raise --duration"):
        wanted_mixed(FULL, made.pairs, (0.01,), 1.0).scenarios([1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["three-way", "--concurrency", "4"], "has no concurrency"),
        (["sweep", "--num-requests", "4,5"], "takes one --num-requests"),
        (["sweep", "--arm", "pdv:x"], "is none of"),
        (["sweep", "--pair", "x:y"], "verifypd models"),
        (["sweep", "--pair", "built-in", "--model", "x"], "give --pair, or"),
        (["models", "--vocab", "3"], "workloads of its own"),
        (["simulate", "sweep", "--gpu", "abacus"], "h200"),
        (["simulate", "sweep", "--alpha", "2"], "--alpha"),
        (["all", "--only", "nothing"], "--only"),
        (["all", "--only", "mixed:many"], "--only"),
        (["comprehensive", "--duration", "4"], "counts its requests here; --cut-off ends a run: leave out --duration"),
        (["models", "--source", "chat"], "models of random weights get random prompts: leave out --source"),
        (["all", "--only", "mixed", "--concurrency", "8"], "that is for sweep: leave out --concurrency"),
        (["mixed", "--pair", "built-in", "--served-model", "x"], "leave out --served-model"),
        (["mixed", "--pair", "built-in", "--scale", "2"], "leave out URLs, --scale"),
        (["mixed", "--pair", "built-in", "--batch-size", "2"], "--batch-size is an arm's own"),
    ],
)
def test_bad_input_is_refused_in_words(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments, "--out", tmp_path) == 2
    assert words in capsys.readouterr().err


def test_a_policy_needs_no_more_than_was_loaded(engine: list[str], tmp_path: Path) -> None:
    given = Pair("tiny", engine[1], engine[3])
    shared = {"dtype": "float32", "kv_memory": "32MB", "measure_costs": False}
    engines = Engines([given], tmp_path, shared, slots=3, max_draft=2)
    arm = Tuned("pdv", POLICIES["pdv"], engines)

    async def run() -> None:
        try:
            await arm.prepare({"pair": "tiny", "batch": 2, "requests": 3})
            assert arm.reading()["plans_n"] == 0
            with pytest.raises(ConfigError, match="loaded for batch_size"):
                await arm.prepare({"pair": "tiny", "batch": 4, "requests": 4})
        finally:
            await arm.close()

    asyncio.run(run())


def test_an_engine_is_gone_before_the_next_one_is_loaded(engine: list[str], tmp_path: Path) -> None:
    pairs = [Pair(name, engine[1], engine[3]) for name in ("one", "two")]
    shared = {"dtype": "float32", "kv_memory": "32MB", "measure_costs": False}
    engines = Engines(pairs, tmp_path, shared, slots=3, max_draft=2)
    first, second = (Tuned(name, POLICIES[name], engines) for name in ("plain", "pdv"))

    async def run() -> None:
        settings = {"batch": 2, "requests": 2}
        for arm in (first, second):
            await arm.prepare({"pair": "one", **settings})
        held = weakref.ref(await engines.get("one")), weakref.ref(first._inner)
        await first.prepare({"pair": "two", **settings})
        assert [each() for each in held] == [None, None], "two pairs need not fit at once"
        await engines.close()

    asyncio.run(run())
