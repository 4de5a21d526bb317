"""The same engine on a CUDA device: texts equal the CPU's, and the tickets are really asynchronous."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.pairs import assert_greedy, noisy_copy, preempt_every
from tests.models.checkpoints import FAMILIES, tiny
from verifypd import LLM, SamplingParams
from verifypd.attention import short
from verifypd.bench.exact import same_in_any_company, teacher_forced, write_pair
from verifypd.config import WAITS
from verifypd.control.cost import CostModel
from verifypd.engine import costs
from verifypd.engine.measure import measure
from verifypd.kernels import skinny, wide
from verifypd.kernels.streamed import MODES, Streamed
from verifypd.runtime.graphs import Graphs
from verifypd.runtime.streams import HostCopy

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


PLAIN = {"attention": "torch", "sampler": "torch", "kernels": "torch", "graphs": "off"}
TRITON = {"attention": "triton", "sampler": "triton", "kernels": "triton"}


@pytest.mark.parametrize("changes", [PLAIN, {**TRITON, "graphs": "off"}, {**TRITON, "graphs": "lazy"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_on_the_device(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_family(family, tmp_path, **changes)


@pytest.mark.parametrize("graphs", ["off", "lazy"])
def test_kernels_of_few_rows(graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and attention in CUDA C++, contexts of two splits: tokens are the verifier's own within what bfloat16
    moves, and drafts are accepted."""
    if not short._available(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")
    splits: list[int] = []
    products, attend = launched(skinny.PRODUCTS, monkeypatch), short.attend
    monkeypatch.setattr(short, "attend", lambda *args, **more: (splits.append(args[3].splits), attend(*args, **more)))
    pair = write_pair(tmp_path, head_dim=64)
    found = teacher_forced(pair, 320, 2, device="cuda", graphs=graphs, max_model_len=400)
    assert found["passed"], found
    assert set(products) == set(MODES)
    assert max(splits) > 1


@pytest.mark.parametrize("graphs", ["off", "lazy"])
def test_products_of_many_requests(graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 40 rows in CUDA C++: tokens are the verifier's own within what bfloat16 moves; drafts count."""
    monkeypatch.setattr(wide, "LEAST_BYTES", 0)
    if not wide._available(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and NVRTC")
    products = launched(wide.PRODUCTS, monkeypatch)
    pair = write_pair(tmp_path, head_dim=64, hidden_size=128, intermediate_size=256, vocab_size=512)
    found = teacher_forced(pair, device="cuda", graphs=graphs)
    assert found["passed"], found
    assert set(products) == set(MODES)


def launched(kind: Streamed, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Modes of the products of a kind, as they are launched."""
    modes: list[int] = []
    launch = kind.launch
    monkeypatch.setattr(kind, "launch", lambda mode, *args, **more: (modes.append(mode), launch(mode, *args, **more)))
    return modes


def check_fp8(folder: Path, **changes: Any) -> None:
    """With keys and values in fp8, drafts, graphs and preemption leave the text as it is."""
    verifier = tiny("llama", folder / "verifier")
    draft = noisy_copy(verifier, folder / "draft", 0.05)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    found = []
    for arch, name, graphs in (("plain", None, "off"), ("unified", str(draft), "off"), ("unified", str(draft), "lazy")):
        settings: dict[str, Any] = {**OPTIONS, "prefill_chunk": 11, "kv_cache_dtype": "fp8", **changes}
        with LLM(str(verifier), draft=name, arch=arch, device="cuda", graphs=graphs, **settings) as llm:
            preempt_every(llm, 5)
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
            assert arch == "plain" or llm.engine.stats.accepted
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_keys_and_values_on_the_device(dtype: str, tmp_path: Path) -> None:
    check_fp8(tmp_path, dtype=dtype, batch_invariant=True)


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
    if placement.startswith("prefill") or (placement, wait) == ("fused", "spin"):
        settings["graphs"] = "lazy"  # beside prompts the others' passes are replayed; else all are captured at start
    with LLM(str(verifier), draft=str(draft), arch=arch, device="cuda", **settings) as llm:
        preempt_every(llm, 7)
        outputs = llm.generate(PROMPTS, params)
        assert llm.engine.stats.accepted
        llm.engine.drain()
        llm.engine.check()
    for output in outputs:
        assert_greedy(verifier, output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    "placement", ["fused", "stream", "decode=stream", "prefill=stream", "prefill=partition:16", "decode=partition:16"]
)
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("arch", ["plain", "unified", "auto"])
def test_nothing_waits_for_the_device_but_the_ticket(arch: str, tmp_path: Path) -> None:
    """Steps with drafts, verdicts and prompt chunks never make the host wait; torch itself raises where one does.

    What does wait is the event behind the one copy of a step, and that is not asked before the step after it.
    """
    verifier = tiny("llama", tmp_path / "verifier")
    draft = None if arch == "plain" else str(noisy_copy(verifier, tmp_path / "draft", 0.05))
    settings: dict[str, Any] = {**OPTIONS, "prefill_chunk": 16, "graphs": "lazy"}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(str(verifier), draft=draft, arch=arch, device="cuda", **settings) as llm:
        expected = llm.generate(PROMPTS, params)  # compiles and captures
        copies = 0
        original = HostCopy.__init__

        def counted(copy: HostCopy, *given: Any, **named: Any) -> None:
            nonlocal copies
            copies += 1
            original(copy, *given, **named)

        HostCopy.__init__ = counted  # type: ignore[method-assign]
        passes = llm.engine.stats.passes
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = llm.generate(PROMPTS, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            HostCopy.__init__ = original  # type: ignore[method-assign]
        assert copies == llm.engine.stats.passes - passes
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


def test_batch_invariant_on_the_device(tmp_path: Path) -> None:
    """bfloat16 by kernels whose sums have one order: the same text alone and among others, to the token."""
    found = same_in_any_company(write_pair(tmp_path), graphs="lazy")
    assert found["passed"], found


def test_nothing_is_collected_during_a_capture() -> None:
    """Graphs of an engine that is gone would be freed then, and break it."""
    collecting, x = [], torch.zeros(4, device="cuda")

    def work() -> torch.Tensor:
        collecting.append(gc.isenabled())
        return x + 1

    assert Graphs(torch.device("cuda")).run("key", work).tolist() == [1.0] * 4
    assert collecting == [True, False] and gc.isenabled(), "warmed up, captured, and on again"
