"""Verdicts in C equal those of torch, and leave tokens, lengths and lives alike."""

from __future__ import annotations

import pytest
import torch

from tests.sampling.edges import outcome
from tests.sampling.test_cuda import Cycle, same
from verifypd.engine.build import pick_sampler
from verifypd.errors import ConfigError
from verifypd.kernels import build

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler")


@pytest.mark.parametrize("seed", [8, 9, 10])
def test_verdicts_of_every_kind_are_the_same(seed: int) -> None:
    expected, found = Cycle("cpu", "torch", seed), Cycle("cpu", "native", seed)
    same(found.run(), expected.run())
    for name in ("tokens", "lengths", "drafts", "draft_q"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.state.alive, expected.state.alive)


@pytest.mark.parametrize("acceptance", ["greedy", "rejection", "coupled"])
@pytest.mark.parametrize(("depth", "point"), [(0, False), (1, True), (2, False), (4, True)])
def test_verdicts_at_the_edges(acceptance: str, depth: int, point: bool) -> None:
    for seed in range(31, 51):
        found, expected = (outcome(kernels, acceptance, depth, point, seed) for kernels in ("native", "torch"))
        assert found == expected


def test_which_sampler_a_cpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert [pick_sampler(name, cpu) for name in ("auto", "native", "torch")] == ["native", "native", "torch"]
    monkeypatch.setenv("VERIFYPD_NATIVE", "0")
    assert pick_sampler("auto", cpu) == "torch"
    with pytest.raises(ConfigError, match="--sampler torch"):
        pick_sampler("native", cpu)
