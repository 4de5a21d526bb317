"""On a GPU nothing is compiled or captured once requests come, whatever their lengths, number, drafts and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.arms import make, prompts
from verifypd import LLM, SamplingParams
from verifypd.bench.exact import write_pair
from verifypd.engine.rehearsal import logit_rows, rehearse
from verifypd.kernels.triton import TritonKernels
from verifypd.metrics.pauses import COLLECTED, COMPILED, WATCH
from verifypd.runtime.streams import HostCopy, keep_busy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# few slots and short drafts: every graph is captured at each start
SETTINGS: dict[str, Any] = {
    "device": "cuda", "graphs": "start", "prefix_cache": False, "batch_size": 3, "max_draft": 2, "prefill_chunk": 11,
}  # fmt: skip
SIZES = {
    "hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    {"temperature": 0.7, "seed": 1, "stop_token_ids": [1, 2, 4, 5, 6]},
    {"temperature": 0.0, "max_draft": 1},
    {"temperature": 0.9, "max_draft": 0},
    {"temperature": 0.0, "logprobs": 2},
]


def run(llm: LLM, counts: tuple[int, ...]) -> None:
    """Requests of odd lengths, so many at once: alone, in mixed chunks, more than a batch takes."""
    for count in counts:
        params = [SamplingParams(**KINDS[i % len(KINDS)], max_tokens=9 + i % 4, ignore_eos=True) for i in range(count)]
        llm.generate(prompts(count), params)


def check_quiet(llm: LLM) -> None:
    """`auto`, then `plain`."""
    WATCH.latest.clear()
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    run(llm, (1, 2, 3, 5, 7))
    assert llm.engine.stats.drafted
    llm.switch_architecture("plain")
    run(llm, (1, 5))
    pauses, names = llm.engine.pauses, [each for each in WATCH.latest if each.kind != COLLECTED]
    assert (pauses.compiled, pauses.captured) == (0, 0), names
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned, "pinned memory was got while requests waited"


@pytest.mark.parametrize("drafter", ["model", "head", "both", "ngram"])
def test_nothing_is_made_while_requests_wait(drafter: str, pair: tuple[Path, Path]) -> None:
    with make(pair, "auto", drafter, dtype="bfloat16", **SETTINGS) as llm:
        check_quiet(llm)


@pytest.mark.parametrize("changes", [{}, {"batch_invariant": True}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}])
def test_nor_by_kernels_of_few_rows(changes: dict[str, Any], tmp_path: Path) -> None:
    """A pair whose heads and widths the CUDA C++ kernels take, in bfloat16."""
    verifier, draft = write_pair(tmp_path, **SIZES)
    settings: dict[str, Any] = {**SETTINGS, "dtype": "bfloat16", "max_model_len": 400, **changes}
    settings |= {"kv_memory": "64MB", "controller": "fixed", "measure_costs": False}
    with LLM(str(verifier), draft=str(draft), arch="auto", **settings) as llm:
        check_quiet(llm)


@pytest.mark.parametrize("drafter", ["model", "head"])
def test_a_crowd_that_comes_at_once_takes_no_memory(drafter: str, pair: tuple[Path, Path]) -> None:
    """What their admissions send is under way at the same time, behind the passes that run."""
    with make(pair, "auto", drafter, dtype="bfloat16", **{**SETTINGS, "graphs": "off", "batch_size": 48}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        before = llm.engine.memory_taken["pinned"]
        for count in (1, 6, 48, 96):
            llm.generate(prompts(count), params)
        assert llm.engine.memory_taken["pinned"] == before, "pinned memory was got while requests waited"


def test_logits_of_any_number_of_rows_wait_for_nothing(tmp_path: Path) -> None:
    """A kernel that was not loaded at start is loaded when it first comes, and that waits until the device is idle."""
    verifier, draft = write_pair(tmp_path, **SIZES, vocab_size=32000)
    settings: dict[str, Any] = {**SETTINGS, "graphs": "off", "dtype": "bfloat16", "max_model_len": 400}
    settings |= {"kv_memory": "64MB", "batch_size": 48, "max_draft": 4, "controller": "fixed", "measure_costs": False}
    with LLM(str(verifier), draft=str(draft), arch="auto", **settings) as llm, torch.inference_mode():
        rehearse(llm.engine)  # as where graphs are captured at start
        runner, most = llm.engine.verify.runner, max(logit_rows(llm.engine))
        hidden = torch.zeros(most, 512, dtype=torch.bfloat16, device="cuda")
        for first in range(1, most + 1, 62):  # fewer launches than a queue holds
            rows = range(first, min(first + 62, most + 1))
            torch.cuda.synchronize()
            keep_busy(hidden.device, 0.5)
            busy = HostCopy({"any": hidden[:1, :1]})
            for count in rows:
                runner.logits(hidden[:count])
            assert not busy.done(), f"one of {rows.start} to {rows.stop - 1} rows made the host wait"


def test_what_is_made_is_counted(pair: tuple[Path, Path]) -> None:
    """A draft loop with penalties is captured when it first comes; a norm of another width is another kernel."""
    with make(pair, "unified", "model", **SETTINGS) as llm:
        llm.generate(prompts(3)[1:], SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=6))
        captured = llm.engine.pauses
        assert captured.captured and captured.captured_seconds > 0
        x = torch.ones(3, 72, device="cuda")
        TritonKernels().rms_norm(x, x[0], 1e-5)
        assert llm.engine.pauses.compiled == captured.compiled + 1
        latest = [each for each in WATCH.latest if each.kind == COMPILED][-1]
        assert "norm_rows" in latest.name and latest.seconds > 0
