"""The same engine on a CUDA device: texts equal the CPU's, and the tickets are really asynchronous."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pairs import assert_greedy, noisy_copy, preempt_every
from tests.models.checkpoints import FAMILIES, tiny
from verifypd import LLM, SamplingParams
from verifypd.config import WAITS
from verifypd.control.cost import CostModel
from verifypd.engine import costs
from verifypd.engine.measure import measure

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[3 + (i * 17 + j * j * 7) % 380 for j in range(length)] for i, length in enumerate((1, 5, 16, 33, 40, 12))]
OPTIONS: dict[str, Any] = {
    "controller": "fixed",
    "measure_costs": False,
    "dtype": "float32",
    "max_draft": 4,
    "max_model_len": 250,
    "batch_size": 4,
    "kv_memory": "64MB",
}


def check_family(family: str, folder: Path, **changes: Any) -> None:
    """Greedy text of plain, n-gram and draft-model decoding on the device equals transformers' on the CPU."""
    verifier = tiny(family, folder / "verifier")
    draft = noisy_copy(verifier, folder / "draft", 0.05)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for arch, name in (("plain", None), ("unified", "ngram"), ("unified", str(draft))):
        settings: dict[str, Any] = {**OPTIONS, "prefill_chunk": 11, **changes}
        with LLM(str(verifier), draft=name, arch=arch, device="cuda", **settings) as llm:
            preempt_every(llm, 5)
            outputs = llm.generate(PROMPTS, params)
            assert arch == "plain" or llm.engine.stats.accepted
        for output in outputs:
            assert_greedy(verifier, output.prompt_token_ids, output.outputs[0].token_ids)


TRITON = {"attention": "triton", "sampler": "triton"}


@pytest.mark.parametrize("changes", [{}, TRITON, {**TRITON, "graphs": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_on_the_device(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_family(family, tmp_path, **changes)


def check_seeded(folder: Path) -> None:
    """Coupled text does not depend on drafts or neighbours on the device either."""
    verifier = tiny("llama", folder / "verifier")
    draft = noisy_copy(verifier, folder / "draft", 0.1)
    params = [SamplingParams(seed=s, max_tokens=40, top_p=0.9, ignore_eos=True) for s in range(len(PROMPTS))]
    with LLM(str(verifier), draft=None, arch="plain", device="cuda", **OPTIONS) as llm:
        alone = [llm.generate([p], each)[0].outputs[0].token_ids for p, each in zip(PROMPTS, params, strict=True)]
    with LLM(str(verifier), draft=str(draft), device="cuda", **OPTIONS) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == alone


def test_seeded_text_on_the_device(tmp_path: Path) -> None:
    check_seeded(tmp_path)


def check_placement(placement: str, wait: str, arch: str, folder: Path) -> None:
    """Lanes on streams of their own write what plain decoding writes, however the host waits."""
    verifier = tiny("llama", folder / "verifier")
    draft = noisy_copy(verifier, folder / "draft", 0.1)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    lanes = {"verify_batch": 2} if arch == "pdv" else {}
    settings: dict[str, Any] = {**OPTIONS, **lanes, "placement": placement, "wait": wait, "prefill_chunk": 11}
    with LLM(str(verifier), draft=str(draft), arch=arch, device="cuda", **settings) as llm:
        preempt_every(llm, 7)
        outputs = llm.generate(PROMPTS, params)
        assert llm.engine.stats.accepted
        llm.engine.drain()
        llm.engine.check()
    for output in outputs:
        assert_greedy(verifier, output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("placement", ["fused", "stream", "decode=stream"])
@pytest.mark.parametrize("arch", ["unified", "pd", "pdv"])
def test_placements_and_waits_change_no_text(placement: str, wait: str, arch: str, tmp_path: Path) -> None:
    check_placement(placement, wait, arch, tmp_path)


def check_costs(placement: str, folder: Path) -> None:
    """Passes are timed by the device's own events, and nothing is left behind."""
    verifier = tiny("llama", folder / "verifier")
    settings: dict[str, Any] = {**OPTIONS, "placement": placement}
    with LLM(str(verifier), draft=str(verifier), device="cuda", **settings) as llm:
        found = measure(llm.engine, budget=20.0, progress=False)
        assert found.timings and all(t.verify_seconds > 0 for t in found.timings)
        assert any(t.draft_seconds > 0 for t in found.timings)
        assert costs.fit(CostModel(), found).known
        llm.engine.check()


@pytest.mark.parametrize("placement", ["fused", "stream"])
def test_costs_are_measured_on_the_device(placement: str, tmp_path: Path) -> None:
    check_costs(placement, tmp_path)
