"""The numbers of the weights follow a timing that is kept; --dtype overrides it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from verifypd import LLM
from verifypd.engine import dtypes
from verifypd.kernels import build

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


def pretend(cache: Path, **seconds: float) -> None:
    """Other times in the file that is kept."""
    (path,) = cache.glob("dtype-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds}))


def test_the_kept_timing_decides(
    pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dtype_of(pair)  # times both, and keeps what it found
    (path,) = cache.glob("dtype-*.json")
    assert all(0 < seconds < 1 for seconds in json.loads(path.read_text())["seconds"].values())
    monkeypatch.setattr(dtypes, "measure", None)  # nothing is timed again
    pretend(cache, bfloat16=2.0, float32=1.0)
    with caplog.at_level(logging.INFO):
        assert dtype_of(pair) is torch.float32
    assert "weights in float32: a token takes 1.00 in bfloat16, 0.50 in float32" in caplog.text
    assert dtype_of(pair, dtype="bfloat16") is torch.bfloat16
    assert dtype_of(pair, quantization="int8") is torch.bfloat16
    pretend(cache, bfloat16=1.0, float32=2.0)
    assert dtype_of(pair) is torch.bfloat16


def test_plain_decoding_is_timed_by_itself(pair: tuple[Path, Path], cache: Path) -> None:
    for settings in ({}, {"arch": "plain", "draft": None}, {"draft": None}):
        dtype_of(pair, **settings)
    assert len(list(cache.glob("dtype-*.json"))) == 2


@pytest.mark.parametrize(("float32", "chosen"), [(0.89, torch.float32), (0.91, torch.bfloat16)])
def test_noise_decides_nothing(float32: float, chosen: torch.dtype) -> None:
    assert dtypes.choose({"bfloat16": 1.0, "float32": float32}) is chosen


@pytest.mark.parametrize("text", ["", "[]", '{"seconds": {"bfloat16": 1}}', '{"setup": {}, "seconds": {}}'])
def test_a_damaged_file_is_measured_again(
    pair: tuple[Path, Path], cache: Path, text: str, caplog: pytest.LogCaptureFixture
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
