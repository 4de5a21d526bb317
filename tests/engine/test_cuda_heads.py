"""Draft heads in CUDA graphs: the same texts, the same distribution, and nothing waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.arms import ARCHITECTURES, TOKENS, make, parameters, prompts, switch_every, texts
from tests.engine.pairs import preempt_every
from tests.models.checkpoints import tiny
from verifypd import SamplingParams
from verifypd.bench.exact import right_distribution
from verifypd.runtime.streams import HostCopy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REPLAYED: dict[str, Any] = {"device": "cuda", "graphs": "lazy"}
COUNT = 10


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> list[list[int]]:
    """What plain decoding on the CPU writes."""
    with make(pair, "plain", "none", device="cpu", graphs="off") as llm:
        return texts(llm, COUNT)


def kinds(llm: Any) -> set[str]:
    """What was replayed."""
    return {key[1] for key in llm.engine.verify.padded.graphs.keys}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str, late: bool, pair: tuple[Path, Path], expected: list[list[int]]) -> None:
    """Greedy and seeded requests, some with penalties, with preemptions and prompts in chunks."""
    with make(pair, arch, "head", late_tickets=late, **REPLAYED) as llm:
        preempt_every(llm, 5)
        assert texts(llm, COUNT) == expected
        assert llm.engine.stats.accepted and {"verify", "catch up", "draft", "shaped draft"} <= kinds(llm)


def test_switches_and_rests(pair: tuple[Path, Path], expected: list[list[int]]) -> None:
    """Architectures change under way, and features are not always kept."""
    with make(pair, "unified", "head", **REPLAYED) as llm:
        switch_every(llm, 3)
        assert texts(llm, COUNT) == expected
        assert texts(llm, COUNT) == expected, "prefixes are found, some without features"


def test_prefix_hits_are_the_verifiers_own(pair: tuple[Path, Path], expected: list[list[int]]) -> None:
    cached = []
    for drafter in ("none", "head"):
        with make(pair, "plain" if drafter == "none" else "unified", drafter, **REPLAYED) as llm:
            assert texts(llm, COUNT) == expected
            outputs = llm.generate(prompts(COUNT), parameters(COUNT))
            assert [output.outputs[0].token_ids for output in outputs] == expected
            cached.append([output.metrics.cached_tokens for output in outputs])
    assert cached[0] == cached[1] and sum(cached[0])


def test_the_distribution(pair: tuple[Path, Path]) -> None:
    found = right_distribution((str(pair[0]), str(pair[0].parent / "head")), graphs="lazy", device="cuda")
    assert found["passed"], found


@pytest.mark.parametrize("draft", ["eagle", "eagle3"])
def test_eagle_shapes(draft: str, tmp_path: Path) -> None:
    """Random heads as they are published: their drafts fall, and the text does not feel it."""
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=6)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    found = []
    for name, arch, settings in (("none", "plain", {"device": "cuda", "graphs": "off"}), (draft, "unified", REPLAYED)):
        with make((verifier, verifier), arch, name, load_format="dummy", **settings) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts(4), params)])
            assert name == "none" or llm.engine.stats.drafted
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device_but_the_ticket(pair: tuple[Path, Path]) -> None:
    """Passes that a head reads, prompts it reads behind them, and its drafts: one copy a step, and no other wait."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with make(pair, "unified", "head", prefix_cache=False, **REPLAYED) as llm:
        expected = llm.generate(prompts(COUNT), params)  # compiles and captures
        copies, original = 0, HostCopy.__init__

        def counted(copy: HostCopy, *given: Any, **named: Any) -> None:
            nonlocal copies
            copies += 1
            original(copy, *given, **named)

        HostCopy.__init__ = counted  # type: ignore[method-assign]
        passes = llm.engine.stats.passes
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = llm.generate(prompts(COUNT), params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            HostCopy.__init__ = original  # type: ignore[method-assign]
        assert copies == llm.engine.stats.passes - passes
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
