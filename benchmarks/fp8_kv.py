"""What keys and values in fp8 do to real text, on a CPU: the built-in pair on held-out prompts.

    python benchmarks/fp8_kv.py --json benchmarks/results/fp8_kv.json

`kl`: of the next token from a cache in float32, mean over the positions of prompts, and how often the likeliest token
is the same; all else is float32. Beside scales as the engine takes them stand scales of 1 and a cache in bfloat16.
`acceptance`: drafts of the built-in pair that stand, greedy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifypd import LLM, SamplingParams
from verifypd.attention.base import PassLayout
from verifypd.attention.torch import TorchAttention
from verifypd.bench.provenance import provenance
from verifypd.distil.prompts import evaluation_prompts, spread
from verifypd.engine.build import read_tokenizer
from verifypd.engine.calibration import sample
from verifypd.kernels.base import FP8
from verifypd.kernels.torch import TorchKernels
from verifypd.kv.pool import KVCache
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.runtime.inputs import BlockTables
from verifypd.runtime.runner import ModelRunner

TOKENS = 48
LONGEST = 256  # tokens of a prompt that are read
CACHES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": FP8, "fp8, scales of 1": FP8}


@torch.inference_mode()
def moved(texts: list[str]) -> dict[str, Any]:
    """KL and agreement by cache."""
    source = resolve("smollm2")
    tokenizer, shape = read_tokenizer(source), source.config
    assert tokenizer is not None
    model = load_model(source, kernels=TorchKernels(), dtype=torch.float32, device="cpu", max_model_len=512)
    tables = BlockTables(1, LONGEST, 16, torch.device("cpu"))
    tables.write(0, range(1, tables.width + 1))
    tables.flush()
    runners = {
        name: ModelRunner(
            model,
            TorchAttention(),
            KVCache(shape.layers, tables.width + 1, 16, shape.kv_heads, shape.head_dim, dtype, "cpu"),
            tables,
        )
        for name, dtype in CACHES.items()
    }
    runners["fp8"].calibrate(torch.tensor(sample(tokenizer, shape.vocab_size, LONGEST)))
    scales = runners["fp8"].cache.scales
    assert scales is not None
    kl: dict[str, list[Tensor]] = {name: [] for name in CACHES}
    same: dict[str, list[Tensor]] = {name: [] for name in CACHES}
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text)[:LONGEST])
        zero = torch.tensor([0])
        layout = PassLayout.build([len(ids)], [len(ids)], zero, zero, tables.data, 16)
        base = torch.empty(0)
        for name, runner in runners.items():
            law = runner.logits(runner.forward(ids, layout)).double().log_softmax(-1)
            base = law if name == "float32" else base
            kl[name].append((base.exp() * (base - law)).sum(-1))
            same[name].append(law.argmax(-1) == base.argmax(-1))
    found: dict[str, Any] = {
        name: {
            "positions": sum(map(len, parts)),
            "mean_kl": float(torch.cat(parts).mean()),
            "p99_kl": float(torch.cat(parts).quantile(0.99)),
            "argmax_agreement": float(torch.cat(same[name]).double().mean()),
        }
        for name, parts in kl.items()
        if name != "float32"
    }
    found["fp8"]["scales"] = [float(scales.min()), float(scales.max())]
    return found


def accepted(texts: list[str]) -> dict[str, Any]:
    """Drafts that stand, by cache."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    options: dict[str, Any] = {
        "draft": "smollm2-draft", "arch": "unified", "controller": "fixed", "max_draft": 4, "dtype": "float32",
        "device": "cpu", "batch_size": 8, "kv_memory": "256MB", "max_model_len": 512, "attention": "torch",
    }  # fmt: skip
    found = {}
    for kind in ("auto", "fp8"):
        with LLM("smollm2", kv_cache_dtype=kind, **options) as llm:
            metrics = [output.metrics for output in llm.generate(texts, params)]
            tokens = llm.budget.tokens
        spans, drafted, stood = (sum(getattr(m, name) for m in metrics) for name in ("spans", "drafted", "accepted"))
        found["float32" if kind == "auto" else kind] = {
            "acceptance_rate": stood / drafted, "tokens_a_pass": 1 + stood / spans, "spans": spans, "kv_tokens": tokens,
        }  # fmt: skip
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--commit", help="where the tree has no git")
    args = parser.parse_args()
    texts = [prompt.text for prompt in spread(evaluation_prompts(), args.prompts)]
    report: dict[str, Any] = {**provenance(args.commit), "prompts": len(texts)}
    for name, part in (("kl", moved), ("acceptance", accepted)):
        report[name] = part(texts)
        print(json.dumps({name: report[name]}, indent=1), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
