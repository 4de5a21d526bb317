"""Kernels that only the interpreter has run here compile for sm_90 all the same. Needs Triton, and no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]

BUILD = """
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def build(kernel, types, constants, aligned=(), **options):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    known = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, values, known)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert done.metadata.shared <= 227 * 1024, done.metadata.shared
    return done

def in_registers(done, on_stack=0):  # bytes a thread may keep there
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = int(used.split(" STACK:")[1].split()[0])
    return stack <= on_stack and " LOCAL:0 " in used

def reads_nothing_before_it_waits(done):
    before = done.asm["ptx"].split("griddepcontrol.wait")[0]
    before = before.replace("cp.async.bulk.prefetch.L2", "")  # of weights, which no kernel writes
    return not any(access in before for access in ("ld.global", "cp.async", "st.global"))

ints, floats = "*i64", "*fp32"
rows = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32", "x_row": "i32"}
"""

ATTENTION = """
from verifypd.attention import triton_kernels as kernels, triton_plans as plans
from verifypd.attention.tiling import tiling
from verifypd.kernels.tiles import power_of_two

attend = {"q": "*bf16", "cache_k": "*bf16", "cache_v": "*bf16", "slots": "*i64", "starts": "*i64",
    "block_table": "*i32", "q_row": "i32", "table_row": "i32", "splits": "i32", "pairs": "*i32", "members": "*i32",
    "row_offsets": "*i64", "scale": "fp32", "cap": "fp32", "partial": "*fp32", "summary": "*fp32", "counters": "*i32",
    "out": "*bf16", "first_head": "i32", "held": "i32", "tile_rows": "i32", "scales": "*fp32"}
aligned = ["q", "q_row", "cache_k", "cache_v", "out", "partial", "summary", "pairs", "counters", "block_table"]
plan = {"pairs": "*i32", "counters": "*i32", "members": "*i32", "row_offsets": "*i64", "slots": "*i64",
    "starts": "*i64", "begins": "*i64", "count": "i32", "pair_count": "i32", "counter_count": "i32", "splits": "i32",
    "workers": "i32", "least": "i32"}
shapes = [(28, 4, 128, 1, 512, None, False, "wgmma"), (32, 32, 128, 8, 5, None, False, "mma.sync"),
    (12, 4, 96, 4, 5, 4096, True, "mma.sync")]
for heads, kv_heads, width, spans, count, window, capped, instruction in shapes:
    cut = tiling(spans=spans, rows=count, pass_rows=spans * count, context=2048, heads=heads,
        kv_heads=kv_heads, width=width, itemsize=2, window=window, processors=132,
        shared_memory=227 * 1024)
    constants = {"HEADS": heads, "WIDTH": width, "BLOCK_D": power_of_two(width), "LISTED": True,
        "KV_HEADS": kv_heads, "BLOCK_SIZE": 16,
        "PAIRED": cut.pairs > 0, "SPLIT": cut.splits > 1, "UNMASKED": count > 16 and not window, "BEGINS": False,
        "WINDOW": window or 0, "CAPPED": capped,
        "WIDEN": False, "SCALED": False, "BLOCK_M": cut.block_m, "BLOCK_Q": cut.block_q, "BLOCK_N": cut.block_n,
        "SPLIT_TOKENS": cut.split_tokens, "PDL": True}
    done = build(kernels.attend_tile, attend, constants, aligned, num_warps=cut.warps, num_stages=cut.stages)
    assert instruction in done.asm["ptx"] and in_registers(done), (heads, kv_heads, width, spans, count)
    done = build(kernels.attend_tile, {**attend, "cache_k": "*fp8e4nv", "cache_v": "*fp8e4nv"},
        {**constants, "SCALED": True}, aligned, num_warps=cut.warps, num_stages=cut.stages)
    assert instruction in done.asm["ptx"], (heads, kv_heads, width, spans, count)
    assert in_registers(done, on_stack=8), "two numbers, once a program: which kernel keeps them changes with Triton"
    assert "cvt.rn.f16x2.e4m3x2" in done.asm["ptx"] and "ld.shared.b8" not in done.asm["ptx"]
    planned = {"BLOCK_Q": cut.block_q, "LISTED": True, "WINDOW": window or 0, "BEGINS": capped}
    build(plans.plan_pairs, plan, {**planned, "SPLIT": cut.splits > 1, "SPLIT_TOKENS": cut.split_tokens}, num_warps=8)
    if count > 16:
        build(plans.plan_sorted, {**plan, "shared_tiles": "i32"}, {**planned, "TILES": cut.sorted_tiles}, num_warps=2)
for kept, scaled in (("*bf16", False), ("*fp8e4nv", True)):
    pair = {"k": "*bf16", "v": "*bf16", "cache_k": kept, "cache_v": kept, "scales": "*fp32", "write_index": "*i64",
        "k_row": "i32", "v_row": "i32"}
    build(kernels.write_cache, pair, {"ELEMENTS": 256, "WIDTH": 64, "SCALED": scaled, "BLOCK": 256})
    build(kernels.rotate_and_write, {**pair, "q": "*bf16", "q_row": "i32", "positions": "*i64",
        "cos": "*fp32", "sin": "*fp32"}, {"Q_HEADS": 32, "KV_HEADS": 4, "WIDTH": 64, "HALF": 32, "SCALED": scaled,
        "BLOCK_H": 16, "BLOCK_D": 32, "BLOCK_W": 64, "PDL": True})
"""

ROWS_AND_PRODUCTS = """
from verifypd.kernels import triton_kernels as layer

for done in (
    build(layer.norm_rows, {**rows, "x_group": "i32"},
        {"GROUP": 1, "WIDTH": 4096, "BLOCK": 4096, "UNIT": False, "PDL": True}),
    build(layer.add_norm_rows, {**rows, "residual": "*bf16", "total": "*bf16"},
        {"WIDTH": 4096, "BLOCK": 4096, "UNIT": True, "PDL": True}, num_warps=8),
    build(layer.gate_rows, {"gate_up": "*bf16", "out": "*bf16"},
        {"WIDTH": 11008, "BLOCK": 1024, "SILU": True, "PDL": True}),
    build(layer.narrow_rows, {"x": "*bf16", "out": "*fp8e4nv", "scale": "*fp32", "x_row": "i32"},
        {"WIDTH": 11008, "BLOCK": 16384, "PDL": True}, num_warps=8),
    build(layer.divide_rows, {**rows, "squares": "*fp32", "squares_row": "i32"},
        {"WIDTH": 4096, "BLOCK": 4096, "SQUARES": 64, "SQUARES_PADDED": 64, "PDL": True}, num_warps=8),
    build(layer.move_rows, {"cache": "*bf16", "rows": "*bf16", "table": "*i32", "slots": "*i64", "row_span": "*i64",
        "positions": "*i64", "write_index": "*i64", "table_row": "i32"},
        {"WIDTH": 4096, "BLOCK_SIZE": 16, "BLOCK": 2048, "KEEP": True, "PDL": True}),
):
    assert reads_nothing_before_it_waits(done)
done = build(layer.product_tile, {**rows, "bias": "*bf16", "rows": "i32", "outputs": "i32"},
    {"DEPTH": 4096, "BIASED": True, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128}, num_stages=4)
assert "wgmma" in done.asm["ptx"]

from verifypd.kernels import triton_products as products
from verifypd.kernels.tiles import SKINNY_ROWS, skinny_tile

def cut(outputs, depth, gated=False, fp8=False):
    tile = skinny_tile(SKINNY_ROWS, outputs, depth, gated, fp8)
    return {"DEPTH": depth, "BIASED": False, "SCALED": True, "SQUARES": 64, "SQUARES_PADDED": 64, "BLOCK_M": 32,
        "FP8": fp8, "AHEAD": fp8 and tile.parts == 1,
        "BLOCK_N": tile.outputs, "BLOCK_K": tile.depth, "PARTS": tile.parts, "STAGES": tile.stages, "PDL": True}

skinny = {**rows, "channels": "*fp32", "bias": "*bf16", "squares": "*fp32", "rows": "i32", "squares_row": "i32"}
known = ["x", "weight", "squares", "x_row", "squares_row"]
fp8_rows = {"x": "*fp8e4nv", "weight": "*fp8e4nv"}
apart = {"residual": "*bf16", "norm": "*bf16", "stream": "*bf16", "new_squares": "*fp32"}
shapes = ((11008, 4096, True, False), (2048, 5632, False, False), (11008, 4096, True, True), (2048, 5632, False, True))
for outputs, depth, gated, fp8 in shapes:
    kinds = {**skinny, **apart, **(fp8_rows if fp8 else {})}
    done = build(products.skinny_product, kinds, {**cut(outputs, depth, gated, fp8), "OUT": outputs,
        "GATED": gated, "SILU": True, "ADDED": not gated, "UNIT": False}, [*known, "out", *apart], num_warps=4)
    assert ("wgmma" if outputs > 4000 else "mma.sync") in done.asm["ptx"] and in_registers(done), (outputs, depth)
    assert done.asm["ptx"].count("griddepcontrol") == 2 and "cp.async" in done.asm["ptx"]
    assert reads_nothing_before_it_waits(done)
    assert ("f32.e4m3.e4m3" in done.asm["ptx"]) == (fp8 and outputs > 4000)
    assert ("prefetch.L2" in done.asm["ptx"].split("griddepcontrol.wait")[0]) == (fp8 and outputs > 4000)
for fp8 in (False, True):  # of weights, and of the cache
    kept = "*bf16" if fp8 else "*fp8e4nv"
    done = build(products.skinny_qkv, {**skinny, **(fp8_rows if fp8 else {}), "q": "*bf16", "cache_k": kept,
        "cache_v": kept, "scales": "*fp32", "cos": "*fp32", "sin": "*fp32", "write_index": "*i64",
        "positions": "*i64"}, {**cut(12288, 4096, fp8=fp8), "Q_HEADS": 32, "KV_HEADS": 32, "WIDTH": 128,
        "CACHE_SCALED": not fp8},
        [*known, "q", "cache_k", "cache_v", "cos", "sin"], num_warps=4)
    assert "wgmma" in done.asm["ptx"] and in_registers(done) and reads_nothing_before_it_waits(done)
done = build(products.split_rows, {"x": "*bf16", "squares": "*fp32", "out": "*fp8e4nv", "scale": "*fp32",
    "x_row": "i32", "squares_row": "i32", "eps": "fp32"}, {"WIDTH": 4096, "BLOCK": 4096, "SCALED": True,
    "SQUARES": 64, "SQUARES_PADDED": 64, "PDL": True}, num_warps=8)
assert reads_nothing_before_it_waits(done)
"""

TOKENS = """
from verifypd.sampling import triton_cuts as cuts, triton_verdicts as sampling

state = {"floats": floats, "integers": ints, "drafts": ints, "lengths": ints, "x": floats, "x_row": "i32"}
judged = {**state, "own": ints, "scores": floats, "stands": ints, "draft_q": floats, "drawn": ints, "drafts_row": "i32",
    "q_slot": "i32", "q_depth": "i32"}
build(cuts.cut_rows, {**state, "slots": ints, "heat": floats}, {"VOCAB": 32000, "BLOCK": 512, "HEATED": True})
build(sampling.judge_rows, {**judged, "raw": floats, "slots": ints, "depths": ints, "row_span": ints, "raw_row": "i32",
    "widest": "i32"}, {"VOCAB": 32000, "BLOCK": 2048, "HAS_Q": True, "LISTED": True}, num_warps=8)
build(sampling.judge_spans, {**judged, "block_sums": floats, "span_slots": ints, "first_rows": ints,
    "span_depths": ints, "tokens": ints, "draft_lens": ints, "stop_ids": ints, "alive": "*u8", "packed": ints,
    "tokens_row": "i32", "stop_row": "i32", "stop_width": "i32"},
    {"VOCAB": 32000, "BLOCK": 256, "BLOCKS": 125, "BLOCKS_PADDED": 128, "GROUP": 8, "WIDTH": 5, "WIDTH_PADDED": 8,
    "STOPS": 4, "HAS_Q": True, "LISTED": True})
for logits, known, mapped, cut in (("*bf16", 32000, False, True), ("*bf16", 8192, True, True),
        ("*fp32", 32000, False, False)):
    done = build(sampling.propose_rows, {**state, "logits": logits, "names": ints, "places": "*i32", "slots": ints,
        "draft_q": floats, "block_sums": floats, "heat": floats, "logits_row": "i32", "drafts_row": "i32",
        "q_slot": "i32", "q_depth": "i32", "depth": "i32"}, {"VOCAB": 32000, "KNOWN": known, "MAPPED": mapped,
        "CUT": cut, "CUT_BLOCK": 512, "ROW": 2048, "BLOCK": 256, "BLOCKS": 125, "BLOCKS_PADDED": 128, "GROUP": 8,
        "PDL": True}, ["x", "logits", "draft_q", "x_row", "logits_row", "q_slot", "q_depth"], num_warps=8)
    assert in_registers(done) and reads_nothing_before_it_waits(done)

from verifypd.kernels import triton_embeddings as embeddings
from verifypd.runtime.triton_model_inputs import prepare_rows

words = {"ids": ints, "table": "*bf16", "weight": "*bf16", "out": "*bf16", "scale": "fp32", "eps": "fp32"}
shape = {"WIDTH": 4096, "BLOCK": 4096, "SCALED": True, "PDL": True}
done = build(embeddings.embed_norm_rows, {**words, "stream": "*bf16"}, {**shape, "UNIT": True}, num_warps=8)
assert reads_nothing_before_it_waits(done)
done = build(embeddings.embed_beside_rows, {**words, "features": "*bf16", "features_weight": "*bf16",
    "kept": "*bf16", "features_row": "i32"}, {**shape, "NORMED": True}, num_warps=8)
assert reads_nothing_before_it_waits(done)
tensors = ("slots", "own", "back", "given", "row_span", "within", "depths", "lengths", "first", "tokens", "drafts",
    "starts", "positions", "write_index", "ids")
numbers = ("spans", "rows", "depth", "widest", "table_row", "tokens_row", "drafts_row")
for step in (False, True):
    done = build(prepare_rows, {**dict.fromkeys(tensors, ints), **dict.fromkeys(numbers, "i32"), "table": "*i32"},
        {"BLOCK_SIZE": 16, "BEGINS": True, "STEP": step, "BLOCK": 128, "PDL": True}, num_warps=4)
    assert in_registers(done) and reads_nothing_before_it_waits(done)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [ATTENTION, ROWS_AND_PRODUCTS, TOKENS], ids=["attention", "products", "tokens"])
def test_kernels_compile_for_hopper(kernels: str, tmp_path: Path) -> None:
    """What the interpreter accepts, the compiler does too: to machine code for sm_90, with matrix instructions."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "compile_kernels.py"
    script.write_text(BUILD + kernels)
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
