"""Pauses of this process: counted by kind, remembered by name, told apart by time."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest

from verifypd.metrics.pauses import CAPTURED, COLLECTED, COMPILED, WATCH, Pauses, Watch, watch_collections


def test_kinds_are_counted_apart() -> None:
    watch = Watch()
    watch.note(COMPILED, "a kernel", 0.5)
    before = watch.total
    watch.note(COMPILED, "another", 0.25)
    with watch.timed(CAPTURED, "a graph"):
        time.sleep(0.002)
    since = watch.total.since(before)
    assert (since.compiled, since.captured, since.collected, since.compiled_seconds) == (1, 1, 0, 0.25)
    assert since.captured_seconds >= 0.002 and watch.total.compiled == 2
    assert since.summary()["compiled_ms"] == 250.0 and Pauses().summary()["captured"] == 0
    assert [(each.kind, each.name) for each in watch.latest] == [
        (COMPILED, "a kernel"), (COMPILED, "another"), (CAPTURED, "a graph"),
    ]  # fmt: skip


def test_what_lies_in_a_time() -> None:
    watch, now = Watch(), time.monotonic()
    watch.note(COMPILED, "long", 1.0)  # it began a second ago
    assert [each.name for each in watch.between(now - 0.5, now - 0.4)] == ["long"]
    assert not watch.between(now - 3.0, now - 2.0) and not watch.between(now + 1.0, now + 2.0)


def test_collections_are_noted_once() -> None:
    watch_collections()
    watch_collections()
    before = WATCH.total
    gc.collect()
    since = WATCH.total.since(before)
    assert since.collected == 1 and since.collected_seconds > 0
    watch = Watch()
    watch.collection("start", {"generation": 0})
    watch.collection("stop", {"generation": 0})
    assert watch.total.collected == 1 and not watch.latest, "short ones have no name"
    watch.note(COLLECTED, "generation 2", 0.1)
    assert watch.latest[0].name == "generation 2"


def test_tritons_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton compiles is noted, and whoever hooked on before is still called."""
    knobs = pytest.importorskip("triton").knobs
    from verifypd.kernels import watch

    called: list[str] = []

    def earlier(**about: Any) -> None:
        called.append(about["repr"])

    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=earlier)
    monkeypatch.setattr(knobs, "runtime", runtime)
    watch.watch_compiles()
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    watch.watch_compiles()
    assert (runtime.jit_cache_hook, runtime.jit_post_compile_hook) == hooks, "it hooks on once"
    before, about = WATCH.total, {"key": "k", "repr": "norm_rows[…]", "fn": None, "compile": {}}
    assert not hooks[0](**about, is_manual_warmup=False, already_compiled=False), "else it would not be compiled"
    hooks[1](**about, is_manual_warmup=False, already_compiled=False)
    assert WATCH.total.since(before).compiled == 1 and WATCH.latest[-1].name == "norm_rows[…]"
    assert called == ["norm_rows[…]"]
