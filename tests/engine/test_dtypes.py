"""The numbers of the weights follow a timing that is kept; --dtype overrides it."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from verifypd import LLM
from verifypd.engine import dtypes
from verifypd.kernels import build
from verifypd.kernels.native import NativeKernels
from verifypd.models.config import ModelConfig

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own; the tiny model is large enough to be timed."""
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dtypes, "SAMPLE", 1000)
    return tmp_path / "cache" / "costs"


def dtype_of(pair: tuple[Path, Path], **settings: Any) -> torch.dtype:
    with LLM(str(pair[0]), **{"draft": "ngram", "max_model_len": 64, "measure_costs": False, **settings}) as llm:
        return llm.engine.verify.runner.model.dtype


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What a timing finds: float32 at half the time of bfloat16."""
    found = {"bfloat16": [2.0, 3.0], "float32": [1.0, 1.5]}
    monkeypatch.setattr(dtypes, "measure", lambda *_, drafts: found)
    return found


def test_products_are_timed_by_turns(pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "UNDISTURBED", 0.0)
    found = dtypes.measure(ModelConfig.from_folder(pair[0]), NativeKernels(), drafts=True)
    assert list(found) == ["bfloat16", "float32"]
    assert all(len(own) == dtypes.ROUNDS and min(own) > 0 for own in found.values())


def test_a_process_that_had_to_share_its_processors_timed_nothing(
    pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "UNDISTURBED", math.inf)
    found = dtypes.measure(ModelConfig.from_folder(pair[0]), NativeKernels(), drafts=True)
    assert found == {"bfloat16": [], "float32": []} and dtypes.choose(found) is None


def test_the_kept_timing_decides(
    pair: tuple[Path, Path],
    cache: Path,
    times: dict[str, list[float]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dtype_of(pair)  # times both, and keeps what it found
    (path,) = cache.glob("dtype-*.json")
    assert json.loads(path.read_text())["seconds"] == times
    monkeypatch.setattr(dtypes, "measure", None)  # nothing is timed again
    with caplog.at_level(logging.INFO):
        assert dtype_of(pair) is torch.float32
    assert "weights in float32: a token takes 1.00 in bfloat16, 0.50 in float32" in caplog.text
    assert dtype_of(pair, dtype="bfloat16") is torch.bfloat16
    assert dtype_of(pair, quantization="int8") is torch.bfloat16


def test_a_timing_that_was_disturbed_is_not_kept(
    pair: tuple[Path, Path], cache: Path, times: dict[str, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    """Turns that disagree say nothing of this CPU: the usual dtype is taken once, and the next start times again."""
    times["float32"][1] = 4.0
    with caplog.at_level(logging.INFO):
        assert dtype_of(pair) is torch.bfloat16
    assert "the next start times again" in caplog.text and not list(cache.glob("dtype-*.json"))
    times["float32"][1] = 1.5
    assert dtype_of(pair) is torch.float32 and list(cache.glob("dtype-*.json"))


def test_plain_decoding_is_timed_by_itself(pair: tuple[Path, Path], cache: Path, times: dict[str, list[float]]) -> None:
    for settings in ({}, {"arch": "plain", "draft": None}, {"draft": None}):
        dtype_of(pair, **settings)
    assert len(list(cache.glob("dtype-*.json"))) == 2


@pytest.mark.parametrize(
    ("float32", "chosen"),
    [([0.89, 0.5], torch.float32), ([0.91, 1.2], torch.bfloat16), ([0.89, 0.91], None), ([2.0, 0.1], None)],
)
def test_noise_decides_nothing(float32: list[float], chosen: torch.dtype | None) -> None:
    assert dtypes.choose({"bfloat16": [1.0, 1.0], "float32": float32}) is chosen


@pytest.mark.parametrize(
    "text", ["", "[]", '{"seconds": {"bfloat16": [1]}}', '{"setup": {}, "seconds": {}}', '{"seconds": {"bfloat16": 1}}']
)
def test_a_damaged_file_is_measured_again(
    pair: tuple[Path, Path], cache: Path, times: dict[str, list[float]], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtype_of(pair)
    (path,) = cache.glob("dtype-*.json")
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        dtype_of(pair)
    assert "measuring again" in caplog.text
    assert json.loads(path.read_text())["seconds"]


@pytest.mark.parametrize("bound", ["SAMPLE", "LARGEST"])
def test_small_and_large_models_are_not_timed(
    pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(dtypes, bound, {"SAMPLE": 10**9, "LARGEST": 10}[bound])
    assert dtype_of(pair) is torch.bfloat16
    assert not list(cache.glob("dtype-*.json"))
