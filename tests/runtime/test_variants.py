"""What Triton would compile, and what would be captured, is all met before the first request. Without a GPU: variants
of kernels are told apart by Triton's rules, while they are interpreted. On a GPU: tests/engine/test_cuda_pauses.py."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.engine.heads import head_for
from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny, write_tokenizer
from verifypd import LLM, SamplingParams
from verifypd.engine.rehearsal import rehearse

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is for Triton's interpreter")

OPTIONS: dict[str, Any] = {
    "arch": "unified",
    "controller": "fixed",
    "max_draft": 2,
    "measure_costs": False,
    "dtype": "float32",
    "attention": "triton",
    "sampler": "triton",
    "kernels": "triton",
    "max_model_len": 60,
    "kv_memory": "8MB",
    "batch_size": 6,
    "prefill_chunk": 8,
    "device": "cpu",
    "graphs": "start",
}
SIZES = {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
RUN = ("judge_rows", "judge_spans", "prepare_rows")  # of others the results are zeros, for they would take minutes
RESULTS = ("out", "stream", "total", "new_squares", "kept")


def kind(value: Any, name: str, rules: dict[str, Any]) -> Any:
    """What Triton compiles anew for: types, numbers that are 1 or divisible by 16, and places that are."""
    fixed = name in (rules.get("do_not_specialize") or ())
    if isinstance(value, torch.Tensor):
        loose = fixed or name in (rules.get("do_not_specialize_on_alignment") or ())
        return str(value.dtype), None if loose else value.data_ptr() % 16 == 0
    if isinstance(value, bool | float):
        return type(value).__name__
    wide = not -(2**31) <= value < 2**31
    return ("int", wide) if fixed else ("int", wide, 1 if value == 1 else value % 16 == 0)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Variants of all kernels that have been launched."""
    found: set[Any] = set()
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        parameters = inspect.signature(self.fn).parameters
        given = {**dict(zip(parameters, args, strict=False)), **named}
        constants = {name for name, each in parameters.items() if each.annotation in (tl.constexpr, "tl.constexpr")}
        key = tuple(
            (name, value if name in constants or name not in parameters else kind(value, name, self.kwargs))
            for name, value in sorted(given.items())
        )
        found.add((self.fn.__name__, key))
        if self.fn.__name__ in RUN:
            run(self, *args, grid=grid, warmup=warmup, **named)
            return
        for name in RESULTS:
            if name in given:
                given[name].zero_()

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


PADDED = {"vocab_size": 336}  # of which the tokenizer knows some


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "sizes", "changes"),
    [
        ("model", {}, {}),
        ("head", {}, {}),
        ("model", {}, {"batch_invariant": True}),
        ("model", PADDED, {"dtype": "bfloat16"}),
    ],
)
def test_nothing_new_comes_with_requests(
    draft: str, sizes: dict[str, int], changes: dict[str, Any], tmp_path: Path, variants: set[Any]
) -> None:
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=1, **SIZES, **sizes)
    if sizes:
        write_tokenizer(verifier, sizes["vocab_size"] - 5)
    small = noisy_copy(verifier, tmp_path / "draft", 0.1)
    small = head_for(verifier, tmp_path / "head", taught=False) if draft == "head" else small
    base: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "acceptance": "rejection"},
        {"temperature": 0.9, "top_k": 20, "seed": 4, "stop_token_ids": [*range(300, 317)]},
    ]
    with LLM(str(verifier), draft=str(small), **{**OPTIONS, **changes}) as llm:
        rehearse(llm.engine)
        graphs = llm.engine.verify.padded.graphs.keys
        captured, compiled = set(graphs), set(variants)
        for lengths in ((1,), (5, 17), (3, 8, 13), (2, 31, 1, 7, 4, 9, 6)):
            prompts = [[3 + (i * 17 + j * j * 7) % 290 for j in range(length)] for i, length in enumerate(lengths)]
            llm.generate(prompts, [SamplingParams(**base, **kinds[i % 3]) for i in range(len(prompts))])
        assert llm.engine.stats.drafted
        assert set(graphs) == captured
        llm.generate([[5, 6, 7, 5, 6]], SamplingParams(**base, repetition_penalty=1.3))  # its loops come late
        assert {key[1] for key in set(graphs) - captured} == {"shaped draft"}
        assert not {name for name, _ in variants - compiled}
