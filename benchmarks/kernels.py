"""Times the kernels on the shapes of SmolLM2-135M, beside the floors memory and arithmetic set.

    python benchmarks/kernels.py --json benchmarks/results/kernels-$(uname -m).json

Every figure is the minimum of several repeats. A pass is the 30 x 4 linear layers, each with its own weights, so that
they stream from memory as in the model; the output head (49152 x 576) is timed apart.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

from script import command_line, keep

import verifypd  # noqa: F401, before torch, whose allocator it sets

# isort: split
import torch

from verifypd.attention import PassLayout, available_backends, backend
from verifypd.bench.provenance import cpu_name, provenance
from verifypd.kernels import Int8Weight, build, select
from verifypd.kv.pool import KVCache
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model

LAYERS, HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
SHAPES = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTER, HIDDEN), (HIDDEN, INTER)]  # [out, in] of qkv, o, gate_up, down
ROWS = (1, 2, 5, 9, 16, 64, 256)


def fastest(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest of `repeats` runs, after one to warm up."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def measured_floors(repeats: int) -> dict[str, float]:
    """Read bandwidth and the best arithmetic rate of a product that stays in cache."""
    block = torch.ones(64 << 20)
    bandwidth = block.nbytes / fastest(block.sum, repeats) / 1e9
    rates = []
    for kernels in (select(name="torch"), select()):
        x, w = torch.randn(96, 256), torch.randn(256, 256)
        seconds = fastest(lambda k=kernels, x=x, w=w: [k.linear(x, w) for _ in range(50)], repeats)
        rates.append(50 * 2 * 96 * 256 * 256 / seconds / 1e9)
    return {"read_gb_s": bandwidth, "gflop_s": max(rates)}


def linear_table(floors: dict[str, float], repeats: int) -> list[dict[str, object]]:
    """One row per (kernels, weights, rows)."""
    base = [torch.randn(shape) / 24 for _ in range(LAYERS) for shape in SHAPES]
    head = torch.randn(VOCAB, HIDDEN) / 24
    results: list[dict[str, object]] = []
    native = build.library() is not None
    arms = [("torch", "float32")] + [("native", d) for d in ("float32", "bfloat16", "float16", "int8") if native]
    for name, dtype in arms:
        kernels = select(name=name, batch_invariant=True)

        def convert(weight: torch.Tensor, dtype: str = dtype) -> torch.Tensor | Int8Weight:
            return Int8Weight.quantize(weight) if dtype == "int8" else weight.to(getattr(torch, dtype))

        weights, head_weight = [convert(w) for w in base], convert(head)
        size = sum(w.nbytes for w in weights)
        entries = sum(w.numel() for w in base)
        for rows in ROWS:
            inputs = {width: torch.randn(rows, width) for width in (HIDDEN, INTER)}
            count = repeats if rows <= 16 else max(2, repeats // 3)
            seconds = fastest(lambda k=kernels, x=inputs, ws=weights: [k.linear(x[w.shape[1]], w) for w in ws], count)
            head_seconds = fastest(lambda k=kernels, x=inputs, w=head_weight: k.linear(x[HIDDEN], w), count)
            flops = 2 * rows * entries
            floor = max(size / floors["read_gb_s"], flops / floors["gflop_s"]) / 1e9
            results.append(
                {
                    "kernels": name,
                    "weights": dtype,
                    "rows": rows,
                    "layers_ms": round(seconds * 1e3, 2),
                    "gb_s": round(size / seconds / 1e9, 1),
                    "gflop_s": round(flops / seconds / 1e9, 1),
                    "floor_ms": round(floor * 1e3, 2),
                    "of_floor": round(floor / seconds, 2),
                    "head_ms": round(head_seconds * 1e3, 2),
                }
            )
            print("{kernels:7} {weights:9} {rows:4} {layers_ms:9} {gb_s:6} {gflop_s:8} {floor_ms:9} {of_floor:9} "
                  "{head_ms:8}".format(**results[-1]), flush=True)  # fmt: skip
    return results


def attention_table(repeats: int) -> list[dict[str, object]]:
    """Attention of all 30 layers: one request and sixteen, plain and verify spans, and a prefill chunk."""
    results: list[dict[str, object]] = []
    cases = [(1, 1, 256), (1, 5, 256), (1, 1, 1024), (1, 5, 1024), (16, 1, 256), (16, 5, 256), (1, 256, 256)]
    for spans, rows, context in cases:
        block_size = 16
        per_slot = context // block_size + 1
        cache = KVCache(LAYERS, spans * per_slot + 1, block_size, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
        cache.data.normal_()
        table = (torch.randperm(spans * per_slot) + 1).view(spans, per_slot).to(torch.int32)
        starts = torch.full((spans,), context - rows)
        layout = PassLayout.build([rows] * spans, [context] * spans, torch.arange(spans), starts, table, block_size)
        fused = torch.randn(spans * rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
        entry: dict[str, object] = {"requests": spans, "rows_each": rows, "context": context}
        for name in available_backends("cpu"):
            chosen = backend(name, "cpu")

            def run(chosen=chosen, q=q, k=k, v=v, layout=layout, cache=cache):  # type: ignore[no-untyped-def]
                prepared = chosen.prepare(layout)
                for i in range(LAYERS):
                    chosen.attend(q, k, v, cache.layer(i), layout, prepared, scale=0.125, window=None, softcap=None)

            entry[f"{name}_ms"] = round(fastest(run, repeats) * 1e3, 2)
        results.append(entry)
        print(" ".join(f"{key} {value}" for key, value in entry.items()), flush=True)
    return results


def small_table(repeats: int) -> list[dict[str, object]]:
    """Microseconds of one call of the small kernels, where the cost of calling is most of it."""
    results: list[dict[str, object]] = []
    for rows in (1, 5, 16):
        x, residual, weight = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN), torch.randn(HIDDEN)
        gate_up = torch.randn(rows, 2 * INTER)
        qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS]
        positions = torch.arange(rows)
        angles = torch.randn(512, HEAD_DIM // 2)
        cos, sin = angles.cos(), angles.sin()
        for name in ["torch"] + ["native"] * (build.library() is not None):
            kernels = select(name=name)
            calls = {
                "rms_norm": lambda kn=kernels, x=x, w=weight: kn.rms_norm(x, w, 1e-5),
                "add_rms_norm": lambda kn=kernels, x=x, r=residual, w=weight: kn.add_rms_norm(x, r, w, 1e-5),
                "gated": lambda kn=kernels, g=gate_up: kn.gated(g, "silu"),
                "rotate_": lambda kn=kernels, q=q, k=k, p=positions, c=cos, s=sin: kn.rotate_(q, k, p, c, s),
            }
            entry: dict[str, object] = {"kernels": name, "rows": rows}
            for call, run in calls.items():
                seconds = fastest(lambda run=run: [run() for _ in range(200)], repeats)
                entry[f"{call}_us"] = round(seconds / 200 * 1e6, 1)
            results.append(entry)
            print(" ".join(f"{key} {value}" for key, value in entry.items()), flush=True)
    return results


def pass_table(repeats: int) -> list[dict[str, object]]:
    """Whole passes of the built-in model without its head: in one call of C, and operation by operation."""
    results: list[dict[str, object]] = []
    numbers = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "int8": (torch.float32, True)}
    attention = backend("native")
    for weights, (dtype, int8) in numbers.items():
        model = load_model(
            resolve("smollm2"),
            dtype=dtype,
            device="cpu",
            kernels=select(),
            quantization="int8" if int8 else None,
            max_model_len=512,
        )
        layers = model.native
        cache = KVCache(LAYERS, 513, 16, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
        table = (torch.randperm(512) + 1).view(16, 32).int()
        for requests, rows, start in ((1, 1, 150), (1, 5, 150), (4, 1, 150), (16, 1, 150), (1, 128, 0)):
            slots, starts = torch.arange(requests), torch.full((requests,), start)
            layout = PassLayout.build([rows] * requests, [start + rows] * requests, slots, starts, table, 16)
            ids = torch.randint(0, 40000, (layout.rows,))
            best = {"one_call_ms": float("inf"), "by_operation_ms": float("inf")}
            for _ in range(repeats):
                for way, native in zip(best, (layers, None), strict=True):
                    model.native = native
                    begun = time.perf_counter()
                    model.forward(ids, layout, attention, cache)
                    best[way] = min(best[way], 1e3 * (time.perf_counter() - begun))
            entry = {"weights": weights, "requests": requests, "rows_each": rows, "context": start + rows}
            results.append(entry | {way: round(value, 2) for way, value in best.items()})
            print(" ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    return results


def main() -> None:
    """Print the tables, and write them as JSON where asked."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    floors = {key: round(value, 1) for key, value in measured_floors(args.repeats).items()}
    print(f"{cpu_name()}, {torch.get_num_threads()} threads; read {floors['read_gb_s']} GB/s, "
          f"{floors['gflop_s']} GFLOP/s in cache")  # fmt: skip
    print("kernels weights   rows layers_ms   GB/s  GFLOP/s  floor_ms  of_floor  head_ms")
    result = {
        "what": "kernels on SmolLM2-135M shapes; minimum of repeats",
        **provenance(args.commit),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "floors": floors,
        "linear": linear_table(floors, args.repeats),
        "attention": attention_table(args.repeats),
        "small": small_table(args.repeats),
        "passes": pass_table(args.repeats) if build.library() is not None else [],
    }
    keep(result, args.json)


if __name__ == "__main__":
    main()
