"""What keys and values in fp8 do to real text, on a CPU: the built-in pair on held-out prompts.

    python benchmarks/fp8_kv.py --json benchmarks/results/fp8_kv.json

`kl`: of the next token from a cache in float32, mean over the positions of prompts, and how often the likeliest token
is the same; all else is float32. Beside scales as the engine takes them stand scales of 1 and a cache in bfloat16.
`acceptance`: drafts of the built-in pair that stand, greedy.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from rounding import accepted, moved
from script import command_line, keep
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.attention.torch import TorchAttention
from verifypd.bench.provenance import provenance
from verifypd.distil.prompts import evaluation_prompts, spread
from verifypd.engine.build import read_tokenizer
from verifypd.engine.calibration import sample
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.weights import FP8
from verifypd.kv.pool import KVCache
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.runtime.inputs import BlockTables
from verifypd.runtime.runner import ModelRunner

TOKENS = 48
LONGEST = 256  # tokens of a prompt that are read
CACHES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": FP8, "fp8, scales of 1": FP8}


@torch.inference_mode()
def caches_moved(texts: list[str]) -> dict[str, Any]:
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
    zero = torch.tensor([0])

    def logits(runner: ModelRunner, ids: Tensor) -> Tensor:
        return runner.logits(runner.forward(ids, PassLayout.build([len(ids)], [len(ids)], zero, zero, tables.data, 16)))

    prompts = [torch.tensor(tokenizer.encode(text)[:LONGEST]) for text in texts]
    found = moved(prompts, {name: partial(logits, runner) for name, runner in runners.items()})
    found["fp8"]["scales"] = [float(scales.min()), float(scales.max())]
    return found


def stood(texts: list[str]) -> dict[str, Any]:
    """Drafts that stand, by cache."""
    kinds = {"float32": "auto", "fp8": "fp8"}
    return {name: accepted(texts, TOKENS, kv_cache_dtype=kind, attention="torch") for name, kind in kinds.items()}


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    texts = [prompt.text for prompt in spread(evaluation_prompts(), args.prompts)]
    report: dict[str, Any] = {**provenance(args.commit), "prompts": len(texts)}
    for name, part in (("kl", caches_moved), ("acceptance", stood)):
        report[name] = part(texts)
        print(json.dumps({name: report[name]}, indent=1), flush=True)
        keep(report, args.json)


if __name__ == "__main__":
    main()
