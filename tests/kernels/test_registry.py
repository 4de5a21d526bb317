"""Implementations by name: what runs on a device, what "auto" takes, and what a refusal says."""

from __future__ import annotations

import pytest
import torch

from verifypd.attention.choose import ATTENTION
from verifypd.errors import ConfigError
from verifypd.kernels.choose import KERNELS
from verifypd.kernels.registry import Backend, Registry, anywhere
from verifypd.sampling.choose import SAMPLERS

ALL = (KERNELS, ATTENTION, SAMPLERS)
ANIMALS: Registry[str] = Registry(
    "--animal",
    Backend("fish", "water", lambda device: device.type == "cuda", lambda shy: "fish", by_itself_on="cuda"),
    Backend("cat", "a lap", lambda device: device.type != "meta", lambda shy: f"cat, shy: {shy}"),
    Backend("snail", "nothing", anywhere, lambda shy: "snail", by_itself_on=""),
)


def test_auto_takes_the_first_that_runs_by_itself() -> None:
    assert ANIMALS.available("cuda") == ["fish", "snail"]
    assert ANIMALS.available("cpu") == ["snail"]
    assert ANIMALS.choose("auto", "cuda:1").name == "fish"
    assert ANIMALS.choose("auto", torch.device("cpu")).make(False) == "snail"


def test_others_are_taken_when_asked_for() -> None:
    assert ANIMALS.choose("cat", "cpu").make(True) == "cat, shy: True"


def test_a_refusal_says_what_is_missing_and_what_would_do() -> None:
    with pytest.raises(
        ConfigError, match="--animal fish does not run on cpu here: it needs water; use one of: auto, s"
    ):
        ANIMALS.choose("fish", "cpu")
    with pytest.raises(ConfigError, match="--animal dog is not known; use one of: auto, fish, cat, snail"):
        ANIMALS.choose("dog", "cpu")


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.flag)
def test_each_package_has_a_reference_that_runs_everywhere(registry: Registry[object]) -> None:
    assert {"native", "triton", "torch"} <= set(registry.backends)
    assert registry.available("meta") == ["torch"] == registry.available("cpu")[-1:]
    for name in registry.available("cpu"):
        assert registry.choose(name, "cpu").make(False).name == name  # type: ignore[attr-defined]


def test_without_a_compiler_a_cpu_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFYPD_NATIVE", "0")
    for registry in ALL:
        assert registry.choose("auto", "cpu").name == "torch"
        with pytest.raises(ConfigError, match="install gcc or clang"):
            registry.choose("native", "cpu")
