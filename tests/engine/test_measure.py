"""Pass times: measured through the lanes, nothing left behind, kept and read back, and used by the policies."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifypd import LLM, SamplingParams
from verifypd.control.auto import Auto
from verifypd.control.cost import CostModel
from verifypd.control.observe import StepTiming
from verifypd.control.throughput import ThroughputController
from verifypd.engine import costs
from verifypd.engine import measure as measuring
from verifypd.engine.measure import REPEATS, Measured, grid, measure, time_points
from verifypd.engine.scratch import Point
from verifypd.errors import EngineError
from verifypd.kernels import build

PROMPT = [5, 9, 200, 31, 7, 5, 9, 200]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def make(pair: tuple[Path, Path], drafter: str | None = "model", **settings: Any) -> LLM:
    options: dict[str, Any] = {"dtype": "float32", "max_draft": 3, "max_model_len": 128, "kv_memory": "16MB"}
    options |= {
        "arch": "unified",
        "controller": "fixed",
        "batch_size": 4,
        "prefill_chunk": 16,
        "draft_chunk": 16,
        "block_size": 8,
    }
    named = str(pair[1]) if drafter == "model" else drafter
    return LLM(str(pair[0]), draft=named, **{**options, **settings})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


# -- the grid ----------------------------------------------------------------------------------------------------------


DRAFTERS: dict[str, Any] = {
    "none": None,
    "ngram": SimpleNamespace(has_cache=False),
    "model": SimpleNamespace(has_cache=True),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("batch", "max_draft", "max_len"), [(1, 0, 40), (32, 8, 8192), (5, 3, 128), (256, 16, 4096)])
def test_the_grid_covers_what_the_model_has_terms_for(drafter: str, batch: int, max_draft: int, max_len: int) -> None:
    points = [*itertools.chain(*grid(batch, max_draft, max_len, 256, 256, DRAFTERS[drafter]))]
    assert len(set(points)) == len(points)
    assert all(point.context + point.chunk + point.drafts < max_len for point in points)
    assert max(point.drafts for point in points) == (max_draft if DRAFTERS[drafter] else 0) or max_len < 200
    assert {1, batch} <= {point.requests for point in points}
    assert len({point.context for point in points}) >= 2
    assert any(point.lag > 2 for point in points) == (drafter == "model")
    if max_len >= 1000:
        assert any(p.chunk and not p.requests for p in points) and any(p.chunk and p.requests for p in points)


def test_what_tells_the_coefficients_apart_comes_first() -> None:
    first, rest = grid(32, 8, 8192, 256, 256, DRAFTERS["model"])
    assert any(p.chunk and p.requests for p in first) and any(p.chunk and p.context > 500 for p in first)
    assert {p.requests for p in first} == {0, 1, 8} and {p.drafts for p in first} == {0, 1, 2, 4}
    assert {p.context > 500 for p in first if p.drafts} == {False, True}, "loops at more than one context"
    assert any(p.lag > 2 for p in first)
    assert not set(first) & set(rest)
    for part in (first, rest):
        assert [point.work for point in part] == sorted(point.work for point in part)
    assert max(p.chunk for p in first) == 64, "large chunks are slow on a CPU"
    quick, _ = grid(32, 8, 8192, 2048, 256, DRAFTERS["model"], quick=True)
    assert {p.chunk for p in quick if not p.requests} == {64, 256, 512, 1024, 2048}, "no budget cuts off large chunks"
    assert {p.lag for p in quick if p.lag} == {64, 256}, "nor what a draft catches up with at once"
    decoding = [max(p.work for p in part if p.requests) for part in (first, rest)]
    assert decoding[0] < decoding[1] / 4, "what a budget cuts off is the most work"


def test_where_time_is_short_reading_prompts_is_priced_by_its_rows_not_by_its_pass() -> None:
    """A draft model catches up in passes of their own, which take longer than a step of its loop even for few rows. The
    points that come first are told apart from that: 1,024 rows cost a third of what 64 rows would lead to expect."""

    def timing(point: Point) -> StepTiming:
        step, context = 1.03e-3, point.requests * (point.context + point.drafts)
        loop = point.drafts * (step + 9e-9 * context)
        catching_up = 1.7e-3 + 2.6e-6 * (point.lag - 64) if point.lag else 0.0
        work = {"draft_steps": point.drafts, "draft_rows": point.requests * (point.lag or 2)}
        return StepTiming(point.requests, **work, draft_context=context, draft_seconds=loop + catching_up)

    first, _ = grid(128, 4, 4096, 2048, 1024, DRAFTERS["model"], quick=True)
    cost = CostModel().fit([timing(point) for point in first if point.drafts or point.lag])
    assert cost.draft_seconds(0, 1024, 1024.0) == pytest.approx(4.2e-3, rel=0.1)
    assert cost.draft_seconds(4, 40, 20 * 600.0) == pytest.approx(4 * (1.03e-3 + 9e-9 * 20 * 600), rel=0.1)


def test_a_model_of_few_tokens_has_none() -> None:
    assert grid(4, 3, 8, 16, 16, None) == ([], [])


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_a_head_reads_the_same_chunk_each_time_it_is_timed(pair: tuple[Path, Path]) -> None:
    """Its place is taken from what counts as read, which repeats of a chunk must not add to."""
    with make(pair, "eagle", load_format="dummy", prefill_chunk=64, max_model_len=160) as llm:
        assert None not in time_points(llm.engine, [Point(chunk=64), Point(2, 0, 32, chunk=64)])
        llm.engine.check()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_measuring_leaves_nothing_behind(pair: tuple[Path, Path], drafter: str | None, late: bool) -> None:
    with make(pair, drafter, late_tickets=late, record=None) as llm:
        [before] = llm.generate([PROMPT], GREEDY)
        llm.engine.drain()
        stats = copy.deepcopy(llm.engine.stats)
        policy = llm.engine.architecture
        used = [pool.blocks.available for pool in llm.engine.memory._pools]
        found = measure(llm.engine, budget=60.0, progress=False)
        assert llm.engine.architecture is policy
        assert llm.engine.stats == stats, "the engine's books are its own"
        assert not llm.engine.busy
        llm.engine.check()
        assert [pool.blocks.available for pool in llm.engine.memory._pools] == used
        [after] = llm.generate([PROMPT], GREEDY)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert found.skipped == 0 and found.seconds > 0 and found.overhead > 0
    assert all(t.verify_seconds > 0 and t.step_seconds >= t.device_seconds for t in found.timings)
    assert any(t.chunk_rows and t.verify_requests for t in found.timings)
    drafts = [t for t in found.timings if t.draft_requests]
    assert bool(drafts) == (drafter is not None)
    assert all(t.draft_seconds > 0 for t in drafts)
    if drafter == "model":
        assert {t.draft_steps for t in drafts} >= {0, 1, 3}, "catching up alone, and loops"
        assert max(t.draft_rows for t in drafts) == 16
    cost = costs.fit(CostModel(), found)
    assert cost.known and cost.overhead == found.overhead and cost.coefficients.base > 0


def test_no_prefix_of_a_measurement_is_ever_found(pair: tuple[Path, Path]) -> None:
    """Contexts of scratch requests are not computed: to share their blocks would be to write nonsense."""
    with make(pair) as llm:
        pools = llm.engine.memory._pools
        measure(llm.engine, budget=60.0, progress=False)
        assert all(pool.blocks.prefix_cache and not pool.blocks.by_digest for pool in pools)
        llm.generate([PROMPT * 4], GREEDY)
        assert all(pool.blocks.by_digest for pool in pools)


def test_a_small_budget_leaves_points_out(pair: tuple[Path, Path]) -> None:
    with make(pair) as llm:
        full = measure(llm.engine, budget=60.0, progress=False)
        cut = measure(llm.engine, budget=0.0, progress=False)
    assert len(cut.timings) + cut.skipped == len(full.timings)
    assert cut.skipped > 0


def test_a_pool_too_small_for_a_point_skips_it(pair: tuple[Path, Path]) -> None:
    with make(pair, kv_memory=240_000) as llm:
        found = measure(llm.engine, budget=60.0, progress=False)
        assert llm.engine.stats.preemptions == 0
    assert found.skipped and found.timings
    assert max(t.verify_requests for t in found.timings) < 4 or max(t.verify_context for t in found.timings) < 4 * 64


def test_a_busy_engine_is_not_measured(pair: tuple[Path, Path]) -> None:
    with make(pair) as llm:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
        with pytest.raises(EngineError, match="idle"):
            measure(llm.engine)
        stream.close()


def test_medians_hold_against_one_slow_pass(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second repeat of every point takes an hour longer on the engine's clock."""
    with make(pair, None) as llm:
        clock, launch = llm.engine.placements.clock, llm.engine.verify.launch
        late, runs = {"by": 0.0}, {"count": 0}

        def slowly(batch: Any, **how: Any) -> Any:
            runs["count"] += 1
            late["by"] += 3600.0 if runs["count"] % REPEATS == 2 else 0.0
            return launch(batch, **how)

        llm.engine.placements.clock = lambda: clock() + late["by"]
        llm.engine.verify.launch = slowly  # type: ignore[method-assign]
        monkeypatch.setattr(measuring, "LONG_PASS", 1e9)
        found = measure(llm.engine, budget=1e9, progress=False)
    assert runs["count"] == REPEATS * (len(found.timings) + 1)
    assert max(timing.verify_seconds for timing in found.timings) < 60.0


# -- kept --------------------------------------------------------------------------------------------------------------


def test_times_are_measured_once_and_read_again(
    pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(pair, arch="auto", controller="throughput") as llm:
        auto = llm.engine.architecture
        assert isinstance(auto, Auto) and isinstance(auto.controller, ThroughputController)
        assert auto.cost is auto.controller.cost and auto.cost.known
        believed = auto.cost.coefficients
    [kept] = cache.glob("*.json")
    assert json.loads(kept.read_text())["setup"]["drafter"] == "model"

    monkeypatch.setattr(costs, "measure", lambda *_, **__: pytest.fail("measured again"))
    with make(pair, arch="auto") as llm:  # the controller is no part of the key
        assert llm.engine.architecture.cost.coefficients == believed  # type: ignore[attr-defined]
    with make(pair, arch="pd", controller="throughput") as llm:
        assert llm.engine.architecture.controller.cost.coefficients == believed  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"arch": "pdv", "controller": "threshold"},
        {"arch": "auto", "controller": "throughput", "measure_costs": False},
    ],
)
def test_nothing_is_measured_where_nothing_needs_it(
    pair: tuple[Path, Path], cache: Path, settings: dict[str, Any]
) -> None:
    with make(pair, **settings):
        assert not cache.exists()


def test_asked_for_it_measures_anew(pair: tuple[Path, Path], cache: Path) -> None:
    for _ in range(2):
        with make(pair, measure_costs=True) as llm:
            assert llm.engine.architecture.name == "unified"
            [path] = cache.glob("*.json")
            path.write_text(path.read_text().replace('"skipped": 0', '"skipped": 77'))
            kept = costs.read(path, costs.describe(llm.engine))
            assert kept is not None and kept.skipped == 77
    with make(pair, measure_costs=True) as llm:
        kept = costs.read(path, costs.describe(llm.engine))
        assert kept is not None and kept.skipped == 0


def test_each_combination_has_a_file_of_its_own(
    pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = set()
    variants: list[dict[str, Any]] = [{}, {"batch_size": 3}, {"max_draft": 2}, {"kernels": "torch"}, {"wait": "spin"}]
    for settings in variants:
        with make(pair, **settings) as llm:
            places.add(costs.place(costs.describe(llm.engine)))
    for drafter in (None, "ngram"):
        with make(pair, drafter) as llm:
            places.add(costs.place(costs.describe(llm.engine)))
    with make(pair, kernels="native") as llm:  # as another compiler makes them
        monkeypatch.setattr(build, "name", lambda: "native-other.so")
        places.add(costs.place(costs.describe(llm.engine)))
    assert len(places) == len(variants) + 3


@pytest.mark.parametrize("drafter", ["model", "head"])
def test_times_of_another_draft_quantisation_are_not_used(pair: tuple[Path, Path], cache: Path, drafter: str) -> None:
    named = "model" if drafter == "model" else str(pair[0].parent / "head")
    seen = []
    for weights in ("int8", "none", "int8"):
        with make(pair, named, draft_quantization=weights) as llm:
            setup = costs.describe(llm.engine)
            seen.append(costs.read(costs.place(setup), setup))
            costs.write(costs.place(setup), setup, MEASURED)
    assert seen == [None, None, MEASURED]


SETUP = {"model": "x"}
MEASURED = Measured(
    (StepTiming(verify_requests=1, verify_rows=1, verify_context=64.0, verify_seconds=0.01),), 1e-4, 2.0
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    assert costs.read(path, SETUP) is None
    costs.write(path, SETUP, MEASURED)
    assert costs.read(path, SETUP) == MEASURED
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"], "no part of a file is left"
    kinds = {type(getattr(MEASURED.timings[0], f.name)) for f in fields(StepTiming)}
    read = costs.read(path, SETUP)
    assert read is not None and {type(getattr(read.timings[0], f.name)) for f in fields(StepTiming)} == kinds


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'"format": {costs.FORMAT}', '"format": 2'),
        ('"model": "x"', '"model": "y"'),
        ('"verify_seconds": 0.01', '"verify_seconds": -0.01'),
        ('"verify_seconds": 0.01', '"verify_seconds": 0.0'),
        ('"verify_seconds": 0.01', '"verify_seconds": NaN'),
        ('"verify_seconds": 0.01', '"verify_seconds": "fast"'),
        ('"verify_rows"', '"verify_columns"'),
        ('"overhead"', '"underfoot"'),
        ("{", "["),
    ],
)
def test_a_damaged_file_is_measured_again(
    tmp_path: Path, before: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.json"
    costs.write(path, SETUP, MEASURED)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with caplog.at_level(logging.WARNING):
        assert costs.read(path, SETUP) is None
    assert "measuring again" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_failure(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("VERIFYPD_CACHE", str(blocked / "cache"))
    with make(pair, arch="auto") as llm:
        assert llm.engine.architecture.cost.known  # type: ignore[attr-defined]
    assert "cannot be kept" in caplog.text


def test_without_a_measurement_a_model_stays_as_it_was() -> None:
    assert not costs.fit(CostModel(), Measured((), 0.0, 0.0)).known


def test_points_count_their_rows() -> None:
    assert Point(4, 2).rows == 12
    assert Point(4, 0, chunk=16).rows == 20
