"""Steps before the first request leave nothing behind, and the steps behind a longest gap say what held them up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import make, texts
from verifypd.bench.drive import Drive
from verifypd.bench.workload import Arrival
from verifypd.buckets import CHUNKS
from verifypd.engine.rehearsal import CHUNK, rehearse
from verifypd.metrics.pauses import COMPILED, WATCH
from verifypd.sampling.state import Mode

SLOW = 0.6  # s: more than a busy machine holds a step up


@pytest.mark.parametrize("drafter", ["none", "model", "head", "both", "ngram"])
def test_a_rehearsal_leaves_nothing_behind(drafter: str, pair: tuple[Path, Path], plain: list[list[int]]) -> None:
    with make(pair, "plain" if drafter == "none" else "unified", drafter) as llm:
        engine, modes, spans, chunks = llm.engine, set(), set(), set()
        launch = engine.verify.launch

        def noted(batch: Any, *given: Any, **named: Any) -> Any:
            modes.update(engine.sampling._slots[span.slot].mode for span in batch.spans)
            spans.add(tuple(span.drafts for span in batch.spans))
            chunks.update(span.rows for span in batch.spans if span.start is not None)
            return launch(batch, *given, **named)

        engine.verify.launch = noted  # type: ignore[method-assign]
        rehearse(engine)
        engine.verify.launch = launch  # type: ignore[method-assign]
        assert modes == set(Mode)
        assert spans == ({(0,), (3,), (0, 3), (3, 0)} if drafter != "none" else {(0,), (0, 0)})
        assert chunks == {CHUNK}
        assert not engine.busy and engine.stats.steps == 0 and not engine.sampling.alive.any()
        assert texts(llm, 10) == plain


def test_logits_of_every_tile_are_run_and_of_one_row_more(pair: tuple[Path, Path]) -> None:
    """Libraries change the kernel of a product there; the most come first."""
    with make(pair, "unified", "model", batch_size=5) as llm:
        runner, seen = llm.engine.verify.runner, []
        logits = runner.logits
        runner.logits = lambda hidden: (seen.append(len(hidden)), logits(hidden))[1]  # type: ignore[method-assign]
        rehearse(llm.engine)
        most = 5 * 4 + CHUNKS
        counts = seen[seen.index(most) :]
        assert counts == sorted(set(counts), reverse=True)
        assert set(counts) >= {1, 2, 4, 8, 9, 12, 16, 17, 24, 25, most}


def test_what_was_made_before_the_first_request_does_not_count(pair: tuple[Path, Path]) -> None:
    WATCH.note(COMPILED, "before", 1.0)
    with make(pair, "unified") as llm:
        assert llm.engine.pauses.compiled == 0 and not llm.engine.recent
        WATCH.note(COMPILED, "behind", 0.5)
        assert (llm.engine.pauses.compiled, llm.engine.pauses.compiled_seconds) == (1, 0.5)


@pytest.mark.parametrize("late", [False, True])
def test_the_longest_gap_is_explained(late: bool, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """late: verdicts are collected one turn after their launch, as on a GPU."""
    with make(pair, "unified", "model") as llm:
        engine, launches = llm.engine, 0
        if late:
            monkeypatch.setattr(engine.inflight, "arrived", list)
        launch = engine.verify.launch

        def slow(batch: Any, *given: Any, **named: Any) -> Any:
            nonlocal launches
            launches += 1
            if launches == 5:
                with WATCH.timed(COMPILED, "a new variant"):
                    time.sleep(SLOW)
            return launch(batch, *given, **named)

        engine.verify.launch = slow  # type: ignore[method-assign]
        found = Drive(engine).arriving([Arrival(0.0, 6, 20), Arrival(0.0, 9, 20)])
    gap = found["longest_gap"]
    assert gap["ms"] == pytest.approx(found["gap_ms_max"], abs=0.01) and gap["ms"] > 1e3 * SLOW
    assert (COMPILED, "a new variant") in {(pause["kind"], pause["name"]) for pause in gap["pauses"]}
    step = max(gap["longest_steps"], key=lambda step: step["host_ms"])
    assert step["host_ms"] > 1e3 * SLOW and step["pauses"]["compiled"] == 1
    assert step["requests"] == 2 and step["rows"] >= 2 and step["device_ms"] > 1e3 * SLOW
    before, *within = gap["longest_steps"]
    assert before["at_ms"] < 0.0 <= within[0]["at_ms"] and gap["steps"] >= len(within)
    assert found["pauses"]["compiled"] == 1 and found["pauses"]["compiled_ms"] > 1e3 * SLOW
