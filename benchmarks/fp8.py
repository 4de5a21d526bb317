"""Weights in fp8 (and keys and values, where the engine has them so) against bfloat16.

    python benchmarks/fp8.py --json benchmarks/results/fp8-h200.json              # on a GPU: products and steps
    python benchmarks/fp8.py --cpu --json benchmarks/results/fp8-cpu.json         # what rounding does to real text
    python benchmarks/fp8.py --parts tiles                                        # on a GPU: how products may be cut
    python benchmarks/fp8.py --tiny --parts steps                                 # a test of this script

`products`: one linear layer of Llama-2-7B at a time, with a cold L2 (copies of the weight by turns), in us: bfloat16,
fp8 weights beside rows in bfloat16 (W8A16) and beside rows rounded to fp8 (W8A8). `steps`: device time of steps at 512
tokens of context and what the KV blocks hold, random weights in the shapes of --pair. `text`, on a CPU: the built-in
pair on held-out prompts; KL of the next token from float32 as narrow passes compute it (rows as they are) and as wide
ones do (rows rounded too), and the drafts that stand.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rounding import accepted, moved
from script import command_line, keep
from torch import Tensor

from verifypd import LLM
from verifypd.attention.base import PassLayout
from verifypd.attention.torch import TorchAttention
from verifypd.bench.device import median_ms
from verifypd.bench.dummy import dummy_draft, dummy_model
from verifypd.bench.provenance import provenance
from verifypd.config import EngineConfig
from verifypd.distil.prompts import evaluation_prompts, spread
from verifypd.engine.build import read_tokenizer
from verifypd.kernels.base import Rows, whole
from verifypd.kernels.choose import select
from verifypd.kernels.torch import TorchKernels
from verifypd.kernels.weights import Fp8Weight, Weight, fp8_rows
from verifypd.kv.pool import KVCache
from verifypd.models.base import Model
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model

LEVELS = (1, 8, 32, 128)
ROWS = (1, 16, 64, 128, 512, 2048)
SHAPES = {"qkv": (12288, 4096, False), "output": (4096, 4096, False), "gate_up": (22016, 4096, True),
          "down": (4096, 11008, False)}  # fmt: skip
COLD = 200 << 20  # bytes of copies of a weight: four times the L2 of an H200
PROMPTS, TOKENS = 20, 32


def arms() -> dict[str, dict[str, Any]]:
    """Settings that are compared; those of keys and values where this engine has any."""
    found: dict[str, dict[str, Any]] = {"bf16": {}, "fp8 weights": {"quantization": "fp8"}}
    if "kv_cache_dtype" in {f.name for f in fields(EngineConfig)}:
        found["fp8 KV"] = {"kv_cache_dtype": "fp8"}
        found["both"] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    return found


def copies(outputs: int, depth: int) -> tuple[list[Tensor], list[Fp8Weight]]:
    """A weight as often as the cache does not hold it, in bfloat16 and in fp8."""
    weight = torch.randn(outputs, depth, device="cuda", dtype=torch.bfloat16) * 0.02
    packed = Fp8Weight.quantize(weight)
    count = -(-COLD // weight.nbytes)
    narrow = [Fp8Weight(packed.values.clone(), packed.scale, packed.dtype) for _ in range(2 * count)]
    return [weight.clone() for _ in range(count)], narrow


def us(work: Callable[[Any], object], weights: list[Any]) -> float:
    """Of one product, all copies in turn."""
    return 1e3 * median_ms(lambda: [work(weight) for weight in weights], torch.device("cuda"), 8, 1) / len(weights)


def products(args: argparse.Namespace) -> dict[str, Any]:
    """Time of each linear layer by rows."""
    kernels, found = select("cuda"), {}
    for name, (outputs, depth, gated) in SHAPES.items():
        wide, narrow = copies(outputs, depth)
        for rows in ROWS:
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)

            def work(weight: Weight, x: Tensor = x, gated: bool = gated) -> object:
                return kernels.linear_gated(x, weight, None, "silu") if gated else kernels.linear(x, weight)

            def wide_work(weight: Fp8Weight, x: Tensor = x, gated: bool = gated) -> object:
                both = TorchKernels.linear(kernels, x, weight)  # type: ignore[arg-type]
                return kernels.gated(both, "silu") if gated else both

            took = {"bf16": us(work, wide), "fp8": us(work, narrow), "w8a8": us(wide_work, narrow)}
            found[f"{name} {rows}"] = {kind: round(value, 2) for kind, value in took.items()}
            gbs = outputs * depth / took["fp8"] / 1e3
            print(f"{name:8} {rows:5} rows: " + ", ".join(f"{k} {v:7.1f} us" for k, v in took.items())
                  + f"; fp8 at {gbs:5.0f} GB/s", flush=True)  # fmt: skip
        del wide, narrow
        torch.cuda.empty_cache()
    return found


def tiles(args: argparse.Namespace) -> dict[str, Any]:
    """Ways of cutting a product of few rows with fp8 weights; `late`: none of them is fetched ahead."""
    from triton.runtime.errors import OutOfResources

    from verifypd.kernels import triton
    from verifypd.kernels.tiles import SkinnyTile, skinny_tile

    found: dict[str, Any] = {}
    begun = time.perf_counter()
    for name, (rows_of_weight, depth, gated) in SHAPES.items():
        _, narrow = copies(rows_of_weight, depth)
        x = torch.randn(args.rows, depth, device="cuda", dtype=torch.bfloat16)
        ours = skinny_tile(args.rows, rows_of_weight // (1 + gated), depth, gated, fp8=True)
        assert ours is not None
        named = {f"{t.outputs},{t.depth},{t.stages},{t.parts}": t for t in (ours, *cuts(args.cuts, name))}
        for cut, tile in (*named.items(), ("late", ours)):
            if time.perf_counter() - begun > args.seconds or depth % (tile.depth * tile.parts):
                continue

            def work(weight: Weight, x: Tensor = x, tile: SkinnyTile = tile, gated: bool = gated) -> object:
                return triton._skinny(x, weight, None, tile, "silu" if gated else None)

            triton.FETCH_AHEAD = cut != "late"
            try:
                took = us(work, narrow)
            except OutOfResources as error:
                print(f"{name:8} {cut:12}: {error}", flush=True)
                continue
            found[f"{name} {cut}"] = round(took, 2)
            gbs = rows_of_weight * depth / took / 1e3
            print(f"{name:8} {cut:12}: {took:7.2f} us, {gbs:5.0f} GB/s", flush=True)
        triton.FETCH_AHEAD = True
        del narrow
        torch.cuda.empty_cache()
    return found


def cuts(given: str, shape: str) -> list[Any]:
    """Those of the tiles as typed that are for a shape."""
    from verifypd.kernels.tiles import SkinnyTile

    each = [part.rpartition(":")[::2] for part in given.split()]
    return [SkinnyTile(*map(int, cut.split(","))) for names, cut in each if shape in names.split("+")]


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Plain steps, cycles of four drafts, and the tokens that KV blocks hold, in each arm."""
    from verifypd.engine.measure import time_points
    from verifypd.engine.scratch import Point

    found: dict[str, Any] = {}
    context = 64 if args.tiny else 512
    with tempfile.TemporaryDirectory() as folder:
        verifier, draft = args.pair.split(",")
        model, drafter = dummy_model(verifier, Path(folder), args.tiny), dummy_draft(draft, Path(folder), args.tiny)
        options: dict[str, Any] = {
            "draft": drafter, "load_format": "dummy", "batch_size": 4 if args.tiny else 128, "max_draft": 4,
            "synthetic_acceptance": 0.8, "prefix_cache": False, "measure_costs": False,
        }  # fmt: skip
        options |= {"kv_memory": "32MB", "dtype": "float32", "device": "cpu"} if args.tiny else {"graphs": "lazy"}
        for name, settings in arms().items():
            if args.arms and name not in args.arms.split(","):
                continue
            begun = time.perf_counter()
            llm = LLM(model, **options, **settings)
            most = llm.engine.config.batch_size
            points = [Point(n, drafts, context) for n in LEVELS if n <= most for drafts in (0, 4)]
            timings = zip(points, time_points(llm.engine, points), strict=True)
            entry: dict[str, Any] = {"kv_tokens": llm.budget.tokens, "memory": dict(llm.budget.parts)}
            for point, timing in timings:
                if timing is not None:
                    kind = "cycle" if point.drafts else "plain"
                    entry[f"{kind}_ms_{point.requests}"] = round(1e3 * timing.device_seconds, 4)
            found[name] = entry
            llm.shutdown()
            del llm
            gc.collect()
            torch.cuda.empty_cache()
            print(f"{name} ({time.perf_counter() - begun:.0f} s): {entry}", flush=True)
    return found


class RoundedRows(TorchKernels):
    """Products as wide passes on a GPU have them: rows are rounded to fp8 too."""

    def pack(self, weight: Tensor | Fp8Weight) -> Weight:
        """As it is: what is fp8 is known by it."""
        return weight

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See Kernels.linear."""
        x = whole(x)
        if isinstance(weight, Fp8Weight):
            values, scale = fp8_rows(x)
            x = values.to(x.dtype) * scale[:, None].to(x.dtype)
        return super().linear(x, weight, bias)


def text(args: argparse.Namespace) -> dict[str, Any]:
    """KL and acceptance on the built-in pair, on a CPU in float32 with the same quantised weights."""
    texts = [prompt.text for prompt in spread(evaluation_prompts(), args.prompts)]
    found = {"kl": weights_moved(texts), "acceptance": {}}
    print(json.dumps(found["kl"], indent=1), flush=True)
    for verifier in (None, "fp8"):
        for draft in ("none", "fp8"):
            name = f"verifier {verifier or 'float32'}, draft {'float32' if draft == 'none' else draft}"
            stood = accepted(texts, TOKENS, quantization=verifier, draft_quantization=draft)
            found["acceptance"][name] = stood
    print(json.dumps(found["acceptance"], indent=1), flush=True)
    return found


@torch.inference_mode()
def weights_moved(texts: list[str]) -> dict[str, Any]:
    """How far weights in fp8 move the next token's law."""
    source = resolve("smollm2")
    tokenizer, shape = read_tokenizer(source), source.config
    assert tokenizer is not None
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "max_model_len": 512}
    models = {
        "float32": load_model(source, kernels=TorchKernels(), **options),
        "fp8 weights (W8A16)": load_model(source, kernels=TorchKernels(), quantization="fp8", **options),
        "fp8 weights and rows (W8A8)": load_model(source, kernels=RoundedRows(), quantization="fp8", **options),
    }
    table = torch.arange(1, 17, dtype=torch.int32).view(1, 16)

    def logits(model: Model, ids: Tensor) -> Tensor:
        layout = PassLayout.build([len(ids)], [len(ids)], torch.tensor([0]), torch.tensor([0]), table, 16)
        cache = KVCache(shape.layers, 17, 16, shape.kv_heads, shape.head_dim, torch.float32, "cpu")
        return model.logits(model.forward(ids, layout, TorchAttention(), cache))

    prompts = [torch.tensor(tokenizer.encode(text)[:256]) for text in texts]
    return moved(prompts, {name: partial(logits, model) for name, model in models.items()})


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "products": products, "tiles": tiles, "steps": steps, "text": text,
}  # fmt: skip


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run the parts and report."""
    parser = command_line(__doc__)
    parser.add_argument("--parts", default="products,steps", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--cpu", action="store_true", help="the same as --parts text")
    parser.add_argument("--pair", default="llama-2-7b,eagle", help="verifier,draft: built-in shapes, or a head")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--cuts", default="gate_up:64,256,2,1 gate_up:64,128,5,1 gate_up:64,128,8,1 qkv:64,256,6,1"
                        " qkv:64,128,6,1 output+down:64,128,10,1 output+down:64,256,8,1 output+down:16,128,5,4"
                        " output+down:32,128,4,4", help="tiles: SHAPES:outputs,depth,stages,parts")  # fmt: skip
    parser.add_argument("--rows", type=int, default=8, help="of the part `tiles`")
    parser.add_argument("--arms", default="", help="of the part `steps`, by name (default: all)")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the part `tiles`, at most")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU: tests this script, means nothing")
    args = parser.parse_args(given)
    report: dict[str, Any] = {**provenance(args.commit), "pair": args.pair, "tiny": args.tiny}
    for name in ["text"] if args.cpu else args.parts.split(","):
        begun = time.perf_counter()
        report[name] = PARTS[name](args)
        print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)
        keep(report, args.json)
    return report


if __name__ == "__main__":
    main()
