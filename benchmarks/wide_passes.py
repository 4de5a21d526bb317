"""Passes of 1 to 16 rows of smollm2 on this CPU: checked against float32, then timed against the pass of one row.

    python benchmarks/wide_passes.py --prompts 24 --json wide.json     # some two minutes

Equality first: a matrix product of each kind of weights against float64, and the same bits in every company of rows.
Then how far each kind of weights moves the distribution: KL against float32 and how often the likeliest token is the
same, at every position of prompts that no draft was trained on. Then passes with the output head, arms by turns,
medians; `torch` is the product that torch makes of bfloat16 itself. `--repeats 0` times nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from typing import Any

from script import command_line, keep

import verifypd  # noqa: F401, before torch, whose allocator it sets

# isort: split
import torch
from rounding import moved

from verifypd.attention import PassLayout, backend
from verifypd.bench.provenance import provenance
from verifypd.distil.prompts import evaluation_prompts, spread
from verifypd.engine.build import read_tokenizer
from verifypd.engine.costs import device_name
from verifypd.kernels import Int8Weight, select
from verifypd.kernels.native import NativeKernels
from verifypd.kv.pool import KVCache
from verifypd.models.base import Model
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model

ROWS = (1, 2, 3, 5, 9, 16, 32, 64, 128)
CONTEXT = 150


def check(kernels: NativeKernels) -> dict[str, float]:
    """Relative error of a product by kind of weights; raises where a row feels its neighbours."""
    x, weight = torch.randn(40, 576), torch.randn(216, 576) / 24
    even = weight[:208]  # whose sides divide, as panels need; the last rows are no whole tile
    found = {}
    for name, given in (
        ("float32", kernels.pack(even)),
        ("float32, uneven", kernels.pack(weight)),
        ("bfloat16", kernels.pack(even.bfloat16())),
        ("bfloat16, uneven", kernels.pack(weight.bfloat16())),
        ("int8", kernels.pack(Int8Weight.quantize(even))),
        ("int8, uneven", kernels.pack(Int8Weight.quantize(weight))),
    ):
        exact = given.double() if isinstance(given, torch.Tensor) else given.dequantize().double()
        wanted, got = x.double() @ exact.T, kernels.linear(x, given)
        found[name] = float((got - wanted).norm() / wanted.norm())
        for rows in (1, 2, 5, 8, 9, 17):
            if not torch.equal(kernels.linear(x[:rows], given), got[:rows]):
                raise AssertionError(f"{name}: {rows} rows differ from 40")
    return found


def weights_moved(models: dict[str, Model], prompts: int) -> dict[str, dict[str, Any]]:
    """How far each kind of weights moves the next token's law, over so many held-out prompts."""
    tokenizer = read_tokenizer(resolve("smollm2"))
    assert tokenizer is not None

    def logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
        return model.logits(model.forward(ids, layout_of(len(ids), 0), backend("native"), new_cache()))

    ids = [torch.tensor(tokenizer.encode(prompt.text)[:256]) for prompt in spread(evaluation_prompts(), prompts)]
    return moved(ids, {name: partial(logits, model) for name, model in models.items()})


def new_cache() -> KVCache:
    """Of one request of 512 tokens."""
    return KVCache(30, 33, 16, 3, 64, torch.float32, "cpu")


def layout_of(rows: int, context: int) -> PassLayout:
    """A pass of so many rows of one request behind so many tokens."""
    table = torch.arange(1, 33, dtype=torch.int32).view(1, 32)
    return PassLayout.build([rows], [context + rows], torch.tensor([0]), torch.tensor([context]), table, 16)


def one_pass(model: Model, rows: int, cache: KVCache) -> float:
    """Seconds of a pass of one request with its output head (of 16 rows at most)."""
    layout = layout_of(rows, CONTEXT)
    ids = torch.randint(0, 40000, (rows,))
    begun = time.perf_counter()
    hidden = model.forward(ids, layout, backend("native"), cache)
    model.logits(hidden[:16])
    return time.perf_counter() - begun


def main() -> None:
    """Check, time, print one table."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=0, help="held-out prompts for the KL (default: none)")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    kernels = select("cpu", "native", batch_invariant=True)
    assert isinstance(kernels, NativeKernels)
    report: dict[str, Any] = {
        **provenance(args.commit),
        "cpu": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "float16": kernels.halves,
        "amx": kernels.tiles,
        "panels": sorted(str(dtype) for dtype in kernels.panels),
        "error": check(kernels),
    }
    print(json.dumps(report), flush=True)
    models = {}
    for name, dtype, int8 in (
        ("float32", torch.float32, False),
        ("bfloat16", torch.bfloat16, False),
        ("int8", torch.bfloat16, True),
        ("torch", torch.bfloat16, False),
    ):
        own = select("cpu", "native", batch_invariant=True)
        if name == "torch":
            if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                continue
            assert isinstance(own, NativeKernels)
            own._torch_rows, own.halves, own.panels = {torch.bfloat16: 1}, False, set()
        models[name] = load_model(
            resolve("smollm2"),
            dtype=dtype,
            device="cpu",
            kernels=own,
            quantization="int8" if int8 else None,
            max_model_len=512,
        )
    if args.prompts:
        report["moved"] = weights_moved(models, args.prompts)
        print(json.dumps(report["moved"]), flush=True)
    cache = new_cache()
    report["passes"] = []
    print("rows", *(f"{name:>8} ms  of one" for name in models))
    one: dict[str, float] = {}
    for rows in ROWS if args.repeats else ():
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range((args.repeats if rows <= 16 else 3) + 1):
            for name, model in models.items():
                took = one_pass(model, rows, cache)
                if turn:  # the first warms up
                    times[name].append(took)
        medians = {name: statistics.median(each) for name, each in times.items()}
        one = one or medians
        entry = {n: {"ms": round(1e3 * s, 2), "of_one": round(s / one[n], 3)} for n, s in medians.items()}
        report["passes"].append({"rows": rows, **entry})
        print(f"{rows:4}", *(f"{each['ms']:11.2f}  {each['of_one']:6.2f}" for each in entry.values()), flush=True)
    keep(report, args.json)


if __name__ == "__main__":
    main()
