"""The Triton attention on a GPU: first whether it is right, then how far it is from the floor that its bytes set.

    python benchmarks/attention.py --shapes all --json benchmarks/results/attention-h200.json
    python benchmarks/attention.py --skip-checks --sweep            # other rules for splits and rows of chunk tiles
    python benchmarks/attention.py --skip-checks --sweep tiles      # other tiles, warps and stages; chunks: of these
    python benchmarks/attention.py --fp8                            # keys and values in e4m3
    TRITON_INTERPRET=1 python benchmarks/attention.py --tiny        # no GPU: the checks alone, on small cases

Each check draws its own numbers, compares with float32 attention by ‖out − ref‖ / ‖ref‖ and starts from memory full of
NaN, so that an element nobody wrote shows. Times are medians of a captured graph that goes through as many caches as a
model has layers, so that keys and values come from memory and not from the cache; the floor is every key and value
read once at the speed of a large copy.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from attention_cases import (
    ALL_SHAPES,
    BLOCK,
    CASES,
    DEFAULT_SHAPES,
    PADDED_CASES,
    TINY_CASES,
    TINY_PADDED_CASES,
    TINY_SHAPES,
    Pass,
    flops,
    make_pass,
)
from script import command_line, keep

from verifypd.attention import backend, chunks, tiling
from verifypd.attention import triton as triton_backend
from verifypd.bench.device import SHAPES, copy_tb_s, median_ms
from verifypd.bench.provenance import provenance
from verifypd.kernels.weights import FP8
from verifypd.kv.pool import KVCache

SWEEPS = {  # block_m: of chunks
    "splits": {"least": (128, 256, 512, 1024), "programs": (2, 4), "block_m": (64, 128)},
    "tiles": {"block_m": (64, 128), "block_n": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 5)},
    "chunks": {"block_m": (128,), "block_n": (64, 128), "warps": (8,), "stages": (2, 3)},
    "depths": {"block_m": (64,), "block_n": (64, 128), "warps": (4,), "stages": (2, 3, 4)},
}
CONSTANTS = {  # of the tiling, that a sweep sets
    "least": ("LEAST_SPLIT", "LEAST_CHUNK_SPLIT"),
    "programs": ("PROGRAMS_A_PROCESSOR",),
    "block_m": ("CHUNK_TILE",),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def poison(shape: tuple[int, ...], device: torch.device) -> None:
    """Fill memory that the next allocation of this size gets with NaN."""
    for factor in (1, 2):
        torch.full((factor, *shape), torch.nan, dtype=torch.bfloat16, device=device)


def error(
    shape: tuple[int, ...],
    spans: list[tuple[int, int, int]],
    dtype: torch.dtype,
    device: torch.device,
    fixed: bool,
    options: dict[str, Any],
    padded: bool = False,
    fp8: bool = False,
) -> float:
    """‖out − ref‖ / ‖ref‖ against the torch backend in float32; over the same e4m3 where keys and values are that."""
    case = make_pass(shape, spans, 1, dtype, device, padded, fp8)
    rows, (_, kv_heads, width) = case.exact.rows, case.k.shape
    wide = Pass(
        case.exact, case.exact,
        KVCache(1, case.cache.blocks, BLOCK, kv_heads, width, FP8 if fp8 else torch.float32, device),
        case.q[:rows].float(), case.k[:rows].float(), case.v[:rows].float(), 0,
    )  # fmt: skip
    wide.cache.data.copy_(case.cache.data)
    if case.cache.scales is not None:
        wide.cache.take_scales(case.cache.scales)
    reference = wide.run(backend("torch", device), 1, options)
    poison(tuple(case.q.shape), device)
    found = case.run(backend("triton", device, batch_invariant=fixed), 1, options).float()
    if not found.isfinite().all():
        return float("inf")
    return float((found[:rows] - reference).norm() / reference.norm())


def check(
    shapes: dict[str, tuple[int, ...]],
    cases: dict[str, Any],
    device: torch.device,
    padded: Iterable[str] = (),
    fp8: bool = False,
) -> list[dict[str, Any]]:
    """Every shape, case and type; windows and caps on some."""
    plain: dict[str, Any] = {"window": None, "softcap": None}
    variants = [(torch.bfloat16, False, plain), (torch.bfloat16, True, plain), (torch.float32, False, plain)]
    variants += [(torch.float16, False, plain), (torch.bfloat16, False, {"window": 100, "softcap": 30.0})]
    results = []
    for (shape, numbers), (name, spans) in itertools.product(shapes.items(), cases.items()):
        for dtype, fixed, options in variants:
            found = error(numbers, spans, dtype, device, fixed, options, name in padded, fp8)
            row = {"shape": shape, "case": name, "dtype": str(dtype).removeprefix("torch."), "fixed": fixed, **options}
            results.append({**row, "error": found, "ok": found <= TOLERANCE[dtype]})
            if not results[-1]["ok"]:
                print(f"WRONG {results[-1]}")
    print(f"{sum(r['ok'] for r in results)} of {len(results)} checks passed")
    return results


def time_case(
    shape: tuple[int, ...],
    spans: list[tuple[int, int, int]],
    device: torch.device,
    speed: float,
    beside: Sequence[str] = (),
    padded: bool = False,
    swept: str | None = None,
    fp8: bool = False,
) -> dict[str, Any]:
    """µs of one layer, beside its floor, other rules and other backends; with FlashInfer also a pass's plan."""
    layers = min(shape[0], 16)
    case = make_pass(shape, spans, layers, torch.bfloat16, device, padded, fp8)
    options: dict[str, Any] = {"window": None, "softcap": None}
    ms = layer_ms("triton", case, layers, options, device)
    floor = max(case.read / speed / 1e9, flops(shape, spans) / 790e9)
    row = {"us": ms * 1e3, "floor_us": floor * 1e3, "of_floor": floor / ms, "bytes": case.read}
    row["tflop_s"] = flops(shape, spans) / ms / 1e9
    if swept:
        row["sweep"] = sweep(swept, case, layers, options, device)
    for name in beside if not padded else ():  # others read the shape of a pass on the host
        row[f"{name}_us"] = layer_ms(name, case, layers, options, device) * 1e3
    if "flashinfer_us" in row:
        row["flashinfer_plan_us"] = plan_us(case, options)
    return row


def plan_us(case: Pass, options: dict[str, Any]) -> float:
    """Median µs of the host for the plan of a pass on an idle device; a layer's launches are taken off."""
    chosen, times = backend("flashinfer", case.q.device), []
    for _ in range(12):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        prepared = chosen.prepare(case.layout)
        case.run(chosen, 1, options, prepared)
        planned = time.perf_counter()
        case.run(chosen, 1, options, prepared)
        times.append((planned - begun) - (time.perf_counter() - planned))
    return statistics.median(times) * 1e6


def layer_ms(name: str, case: Pass, layers: int, options: dict[str, Any], device: torch.device) -> float:
    """Median ms of one layer."""
    chosen = backend(name, device)
    prepared = chosen.prepare(case.layout)
    return median_ms(lambda: case.run(chosen, layers, options, prepared), device) / layers


@contextmanager
def tilings_of(rule: Callable[..., tiling.Tiling]) -> Iterator[None]:
    """Let another rule cut attention, of Triton's own kernel."""
    original, takes = triton_backend.tiling, chunks.suits
    triton_backend.tiling = rule
    chunks.suits = lambda *args: False
    try:
        yield
    finally:
        triton_backend.tiling, chunks.suits = original, takes


def sweep(kind: str, case: Pass, layers: int, options: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """The same case cut otherwise; cuts that do not compile or fit are left out. Fastest first."""
    found: list[dict[str, Any]] = []
    chunks = any(n > tiling.SHORT_ROWS for n in case.exact.span_rows)
    for values in itertools.product(*SWEEPS[kind].values()):
        change = dict(zip(SWEEPS[kind], values, strict=True))
        if change["block_m"] > 64 and not chunks:
            continue
        with tilings_of(lambda change=change, **bounds: _other(change, bounds)):
            try:
                found.append({**change, "us": layer_ms("triton", case, layers, options, device) * 1e3})
            except Exception as reason:  # noqa: BLE001  # whatever the compiler says: the next one may do
                found.append({**change, "us": float("inf"), "failed": str(reason).splitlines()[0][:100]})
    return sorted(found, key=lambda row: row["us"])


def _other(change: dict[str, int], bounds: dict[str, Any]) -> tiling.Tiling:
    """The tiling with other constants, and with something else in it."""
    names = {constant: change[name] for name, group in CONSTANTS.items() if name in change for constant in group}
    kept = {name: getattr(tiling, name) for name in names}
    for name, value in names.items():
        setattr(tiling, name, value)
    try:
        cut = tiling.tiling(**bounds)
    finally:
        for name, value in kept.items():
            setattr(tiling, name, value)
    return replace(cut, **{name: value for name, value in change.items() if name not in CONSTANTS})


def main() -> None:
    """Check, then time."""
    parser = command_line(__doc__)
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help=f"comma-separated; all: {ALL_SHAPES}")
    parser.add_argument("--cases", help="some of the cases, comma-separated")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--sweep", nargs="?", const="splits", choices=SWEEPS, help="time other cuts too")
    parser.add_argument("--fp8", action="store_true", help="keys and values in e4m3")
    parser.add_argument("--torch", action="store_true", help="time the torch backend beside it")
    parser.add_argument("--flashinfer", action="store_true", help="time FlashInfer beside it, where it is installed")
    parser.add_argument("--tiny", action="store_true", help="small cases, checks only")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device here; --tiny with TRITON_INTERPRET=1 checks small cases without one")
    shapes = (
        TINY_SHAPES
        if args.tiny
        else {name: SHAPES[name] for name in (ALL_SHAPES if args.shapes == "all" else args.shapes).split(",")}
    )
    cases, padded_cases = (TINY_CASES, TINY_PADDED_CASES) if args.tiny else (CASES, PADDED_CASES)
    if args.cases:
        wanted = args.cases.split(",")
        unknown = [name for name in wanted if name not in cases | padded_cases]
        if unknown:
            parser.error(f"--cases: {unknown[0]} is none of {', '.join(cases | padded_cases)}")
        cases, padded_cases = (
            {name: c for name, c in known.items() if name in wanted} for known in (cases, padded_cases)
        )
    beside = [name for name in ("torch", "flashinfer") if getattr(args, name)]
    report: dict[str, Any] = {**provenance(args.commit), "fp8": args.fp8, "checks": [], "times": []}
    with torch.inference_mode():
        if not args.skip_checks:
            report["checks"] = check(shapes, cases | padded_cases, device, padded_cases, args.fp8)
        if not args.tiny:
            speed = report["copy_tb_s"] = copy_tb_s(device)
            columns = f"{'shape':16} {'case':30} {'µs':>8} {'floor':>8} {'of floor':>8} {'TFLOP/s':>8}"
            print(f"copy {speed:.2f} TB/s\n{columns}")
            for (shape, numbers), (name, spans) in itertools.product(shapes.items(), (cases | padded_cases).items()):
                padded = name in padded_cases
                timed = time_case(numbers, spans, device, speed, beside, padded, args.sweep, args.fp8)
                row = {"shape": shape, "case": name, **timed}
                report["times"].append(row)
                others = "".join(f"  {k.removesuffix('_us')} {row[k]:.1f}" for k in row if k.startswith(tuple(beside)))
                line = f"{shape:16} {name:30} {row['us']:8.1f} {row['floor_us']:8.1f} {row['of_floor']:8.0%}"
                line += f" {row['tflop_s']:8.0f}"
                print(line + others, flush=True)
                if args.sweep:
                    ranked = row["sweep"]
                    named = [("/".join(str(r[key]) for key in SWEEPS[args.sweep]), r["us"]) for r in ranked]
                    best = "; ".join(f"{cut} {us:.1f}" for cut, us in [*named[:5], named[-1]])
                    print(f"    {'/'.join(SWEEPS[args.sweep])}: {best} (slowest)", flush=True)
    keep(report, args.json)
    sys.exit(0 if all(row["ok"] for row in report["checks"]) else 1)


if __name__ == "__main__":
    main()
