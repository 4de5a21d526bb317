"""The Triton backend equals a dense softmax and the torch backend: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.bench.scripts import load

pytest.importorskip("triton")

from tests.attention.test_backends import FIRSTS, MIXED, Case, dense, make_case
from tests.models.checkpoints import tiny
from verifypd import LLM, SamplingParams
from verifypd.attention import PassLayout, available_backends, backend, tiling, triton_plans
from verifypd.attention import triton as module
from verifypd.attention.triton import TritonAttention
from verifypd.errors import ConfigError
from verifypd.kernels.launch import INTERPRETED_PROCESSORS
from verifypd.kernels.torch import TorchKernels
from verifypd.kv.pool import LayerCache
from verifypd.runtime.passes import PassInputs, pass_key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "width": 64}


def on_device(case: Case) -> Case:
    """The same case where Triton runs."""
    moved = {
        f.name: getattr(case.layout, f.name).to(DEVICE)
        for f in fields(PassLayout)
        if isinstance(getattr(case.layout, f.name), Tensor)
    }
    cache = LayerCache(case.cache.k.to(DEVICE), case.cache.v.to(DEVICE))
    q, k, v = (x.to(DEVICE) for x in (case.q, case.k, case.v))
    return Case(replace(case.layout, **moved), cache, case.starts, q, k, v, case.history, case.firsts)


def attend(
    case: Case,
    *,
    window: int | None = None,
    softcap: float | None = None,
    fixed: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, module.Prepared]:
    case = on_device(case)
    chosen = TritonAttention(batch_invariant=fixed)
    prepared = chosen.prepare(case.layout)
    q, k, v = (x if dtype is None else x.to(dtype) for x in (case.q, case.k, case.v))
    scale = q.shape[-1] ** -0.5
    out = chosen.attend(q, k, v, case.cache, case.layout, prepared, scale=scale, window=window, softcap=softcap)
    return out.cpu(), prepared


def splits(prepared: module.Prepared) -> list[int]:
    return [cut.splits for cuts in prepared.cuts.values() for cut in cuts]


def check(case: Case, window: int | None = None, softcap: float | None = None, fixed: bool = False) -> list[int]:
    """Equal to the dense softmax in every row that means something; the splits that were used."""
    out, prepared = attend(case, window=window, softcap=softcap, fixed=fixed)
    assert out.isfinite().all()
    for row, expected in dense(case, case.q.shape[-1] ** -0.5, window, softcap).items():
        assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
    return splits(prepared)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_slots_that_begin_late(window: int | None, fixed: bool) -> None:
    """Spans that begin before, within and behind what their slot holds; with several splits of a context too."""
    check(make_case(MIXED, firsts=FIRSTS, **SMALL), window, fixed=fixed)
    used = check(make_case([(700, 3), (690, 2)], firsts=[513, 691], **SMALL), window, fixed=fixed)
    assert window is not None or max(used) > 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"),
    [(4, 2, 64), (2, 2, 96), (6, 1, 128), (2, 1, 256), (40, 1, 20), (7, 1, 80)],
)
def test_heads(heads: int, kv_heads: int, width: int) -> None:
    check(make_case([(70, 4), (0, 18), (3, 1), (-1, 2)], heads, kv_heads, width))


@pytest.mark.parametrize(("window", "softcap"), [(None, 50.0), (1, None), (7, 5.0), (40, None), (1000, None)])
def test_mixed_spans(window: int | None, softcap: float | None) -> None:
    check(make_case(MIXED, **SMALL, slack=9), window, softcap)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_block_sizes(block_size: int) -> None:
    check(make_case([(100, 5), (-2, 5), (64, 17)], **SMALL, block_size=block_size, slack=2), window=30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, 20.0)])
def test_narrow_types_equal_the_torch_backend(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    spans = [(100, 5), (0, 1), (20, 18), (63, 1), (300, 40)]  # the last goes through blocks that need no mask
    case = make_case(spans, **SMALL, dtype=dtype)
    out, _ = attend(case, window=window, softcap=softcap, dtype=dtype)
    assert out.dtype is dtype
    for row, expected in dense(case, 64**-0.5, window, softcap).items():
        assert_close(out[row].float(), expected, rtol=1e-2, atol=1e-2)
    twin = on_device(make_case(spans, **SMALL, dtype=dtype))
    torch_backend = backend("torch", DEVICE)
    q, k, v = (x.to(dtype) for x in (twin.q, twin.k, twin.v))
    prepared = torch_backend.prepare(twin.layout)
    reference = torch_backend.attend(
        q, k, v, twin.cache, twin.layout, prepared, scale=64**-0.5, window=window, softcap=softcap
    )
    assert_close(out, reference.cpu(), rtol=2e-2, atol=1e-2)


def test_a_wide_cache_of_narrow_numbers() -> None:
    check(make_case([(100, 5), (0, 1), (20, 18)], **SMALL, dtype=torch.bfloat16))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (110, 5.0)])
def test_splits_are_merged(window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "processors", lambda device: 10)
    monkeypatch.setattr(tiling, "LEAST_SPLIT", 8)
    monkeypatch.setattr(tiling, "LEAST_CHUNK_SPLIT", 8)
    assert (
        max(check(make_case([(150, 3)], heads=2, kv_heads=1, width=64), window, softcap)) > 8
    )  # several rounds of merging, empty splits
    assert (
        min(check(make_case([(100, 3), (0, 1), (40, 17), (-2, 3)], heads=2, kv_heads=1, width=64), window, softcap)) > 1
    )


@pytest.mark.parametrize("fixed", [False, True])
def test_partial_results_are_held_some_heads_at_a_time(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where splits are fixed, the workspace holds a range of heads; where they are not, there are fewer splits."""
    monkeypatch.setattr(tiling, "SPLIT_TOKENS", 64)
    case = make_case([(100, 20), (90, 5), (80, 17)], **SMALL)
    used = check(case, fixed=fixed)
    monkeypatch.setattr(tiling, "WORKSPACE_ELEMENTS", 1)
    assert check(case, fixed=fixed) == (used if fixed else [1, 1])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[module.Plans]:
    """The plans that were made, of all classes of a pass; memory that is not written holds garbage."""
    found, empty, plan = [], torch.empty, module.Prepared.plan
    monkeypatch.setattr(module, "processors", lambda device: INTERPRETED_PROCESSORS)
    monkeypatch.setattr(tiling, "LEAST_SPLIT", 128)

    def poisoned(*shape: int, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 77)

    def remembered(*args: Any) -> tuple[module.Plans, bool]:
        made, new = plan(*args)
        assert new == (not any(made is other for other in found))
        if new:
            found.append(made)
        return made, new

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(module.Prepared, "plan", remembered)
    return found


def shares_of(plans: module.Plans, rows: int) -> list[int]:
    """Splits of each row of a pass; all programs are there, each one once, and counters are back at zero."""
    found = [1] * rows
    for plan in plans:
        if plan is None:
            continue
        real = [tuple(pair) for pair in plan.pairs.tolist() if pair[6]]
        assert len({(pair[0], pair[5]) for pair in real}) == len(real) == sum(p[6] for p in real if not p[5])
        for first, count, *_, shares, _ in real:
            found[first : first + count] = [shares] * count
        places = {(pair[0], pair[7]) for pair in real if pair[6] > 1}
        assert len({first for first, _ in places}) == len({place for _, place in places}) == len(places)
        assert all(place < len(plan.counters) for _, place in places)
        assert not plan.counters.any()
    return found


LONG_AMONG_SHORT = [(30, 3), (5, 1), (700, 5), (0, 2), (60, 4), (-2, 5), (31, 1), (90, 2), (-4, 4), (12, 3)]


@pytest.mark.parametrize(
    ("window", "softcap", "firsts", "expected"),
    [
        (None, None, None, 6),
        (None, 20.0, None, 6),
        (300, None, None, 3),
        (40, None, None, 1),
        (None, None, [0, 0, 65, 0, 0, 0, 0, 60, 0, 0], 5),
        (None, None, [0, 0, 650, 0, 0, 0, 0, 60, 0, 0], 1),
    ],
)
def test_a_long_context_is_split_in_a_full_batch(
    window: int | None, softcap: float | None, firsts: list[int] | None, expected: int, plans: list[module.Plans]
) -> None:
    """Ten spans fill the device that the interpreter passes for; the one that is long is shared, and no other."""
    case = make_case(LONG_AMONG_SHORT, **SMALL, firsts=firsts)
    check(case, window, softcap)
    shares = shares_of(plans[0], case.layout.rows)
    assert shares == [expected if int(span) == 2 else 1 for span in case.layout.row_span]


def test_layers_of_a_pass_share_a_plan(plans: list[module.Plans]) -> None:
    """Layers with another window have their own; the next pass follows the lengths it finds, prepared once.

    Each layer finds counters at zero, as the one before it left them: its output is whole.
    """
    host = make_case(LONG_AMONG_SHORT, **SMALL)
    case, chosen = on_device(host), TritonAttention()
    prepared = chosen.prepare(case.layout)
    outs = []
    for window in (None, 300, None, 300):
        out = chosen.attend(
            case.q, case.k, case.v, case.cache, case.layout, prepared, scale=0.125, window=window, softcap=None
        )
        outs.append(out.cpu())
        for row, expected in dense(host, 0.125, window, None).items():
            assert_close(outs[-1][row], expected, rtol=1e-4, atol=1e-5)
    assert [max(shares_of(plan, case.layout.rows)) for plan in plans] == [6, 3]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    case.layout.starts[2] = 7  # the long one
    chosen.attend(
        case.q, case.k, case.v, case.cache, replace(case.layout), prepared, scale=0.125, window=None, softcap=None
    )
    assert len(plans) == 3
    assert max(shares_of(plans[2], case.layout.rows)) == 1


@pytest.mark.parametrize("fixed", [False, True])
def test_whoever_is_done_last_merges_alike(fixed: bool, plans: list[module.Plans]) -> None:
    """Programs in another order give the same bits."""
    case = on_device(make_case(LONG_AMONG_SHORT, **SMALL))
    chosen = TritonAttention(batch_invariant=fixed)
    prepared = chosen.prepare(case.layout)
    outs = []
    for _ in range(2):
        outs.append(
            chosen.attend(
                case.q, case.k, case.v, case.cache, case.layout, prepared, scale=0.125, window=None, softcap=None
            )
        )
        assert max(shares_of(plans[0], case.layout.rows)) > 1
        for plan in plans[0]:
            if plan is not None:
                plan.pairs.copy_(plan.pairs.flip(0))
    assert len(plans) == 1
    assert torch.equal(*outs)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are called through the interpreter")
def test_a_layer_is_one_launch_for_each_kind_of_span(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name, kernel in [(name, kernel) for name, kernel in vars(module).items() if hasattr(kernel, "run")]:

        def counted(*args: Any, name: str = name, run: Any = kernel.run, **options: Any) -> Any:
            launched.append(name)
            return run(*args, **options)

        monkeypatch.setattr(kernel, "run", counted)
    case = make_case([(30, 3), (700, 5), (60, 17)], heads=2, kv_heads=1, width=64)
    chosen = TritonAttention()
    prepared = chosen.prepare(case.layout)
    for _ in range(2):
        chosen.attend(case.q, case.k, case.v, case.cache, case.layout, prepared, scale=1.0, window=None, softcap=None)
    assert splits(prepared) == [3, 1]
    layer = ["write_cache", "attend_tile", "attend_tile"]
    assert launched == [layer[0], "plan_pairs", *layer[1:], *layer]


def test_no_plan_where_nothing_can_be_split(plans: list[module.Plans]) -> None:
    check(make_case([(60, 2), (0, 20), (7, 1)], **SMALL))
    assert plans == [[None, None]]


def test_equal_contexts_that_fill_the_device_are_not_split(plans: list[module.Plans]) -> None:
    check(make_case([(150, 2)] * 10, **SMALL))
    assert plans[0][0] is not None
    assert set(shares_of(plans[0], 20)) == {1}


def padded(case: Case, widest: int) -> tuple[Case, PassInputs]:
    """The case as a captured pass runs it: room for eight chunks, a void span behind them, bounds for lengths."""
    rows = list(case.layout.span_rows)
    short, long = [n for n in rows if n <= widest], [n for n in rows if n > widest]
    inputs = PassInputs(pass_key(short, widest, long), torch.device(DEVICE))
    slots = case.layout.slots.tolist()
    inputs.fill(short, slots, rows, drafted=True, chunks=long)
    lengths = torch.zeros(12, dtype=torch.int64)
    lengths[case.layout.slots] = torch.tensor([start + n for start, n in zip(case.starts, rows, strict=True)])
    table = case.layout.block_table
    layout = inputs.layout(lengths.to(DEVICE), table.to(DEVICE), 16, table.shape[1] * 16)
    missing = layout.rows - case.layout.rows
    q, k, v = (torch.cat((x, torch.ones(missing, *x.shape[1:]))).to(DEVICE) for x in (case.q, case.k, case.v))
    cache = LayerCache(case.cache.k.to(DEVICE), case.cache.v.to(DEVICE))
    return Case(layout, cache, case.starts, q, k, v, case.history), inputs


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (400, 20.0)])
def test_a_padded_launch_follows_lengths_that_grow(
    window: int | None, softcap: float | None, plans: list[module.Plans], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch, prepared once: short contexts beside a chunk behind a long one, then a long one among the short."""
    monkeypatch.setattr(tiling, "LEAST_CHUNK_SPLIT", 128)
    chosen = TritonAttention()
    prepared = None
    spans = [(30, 3), (2, 2), (9, 4), (600, 20)], [(5, 3), (580, 3), (640, 21)]
    found = []
    for each in spans:
        most = max(start + n for start, n in each)
        case = make_case(each, heads=2, kv_heads=1, width=64, slack=672 - most)  # tables of one size
        twin, _ = padded(case, 4)
        prepared = prepared or chosen.prepare(twin.layout)
        out = chosen.attend(
            twin.q, twin.k, twin.v, twin.cache, twin.layout, prepared, scale=0.125, window=window, softcap=softcap
        ).cpu()
        assert out.isfinite().all()
        for row, expected in dense(case, 0.125, window, softcap).items():
            assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
        shares = shares_of(plans.pop(), twin.layout.rows)
        assert not plans
        found.append([shares[int(case.layout.row_offsets[r])] for r in range(len(each))])
        assert set(shares[case.layout.rows :]) == {1}
    assert found[0][:3] == [1, 1, 1] and found[0][3] > 1
    assert found[1][0] == 1 and min(found[1][1:]) > 1


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (150, 20.0)])
def test_chunks_of_several_rounds(
    window: int | None, softcap: float | None, plans: list[module.Plans], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers and ten tiles: the last rounds are shared, and in a padded pass too."""
    monkeypatch.setattr(module, "processors", lambda device: 3)
    monkeypatch.setattr(tiling, "LEAST_CHUNK_SPLIT", 64)
    case = make_case([(9, 3), (70, 80), (200, 17), (90, 41)], **SMALL)
    check(case, window, softcap)
    twin, _ = padded(case, 4)
    chosen = TritonAttention()
    out = chosen.attend(
        twin.q, twin.k, twin.v, twin.cache, twin.layout, chosen.prepare(twin.layout), scale=0.125, window=window,
        softcap=softcap,
    ).cpu()  # fmt: skip
    assert out.isfinite().all()
    for row, expected in dense(case, 0.125, window, softcap).items():
        assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
    exact, bounded = (shares_of(plan, twin.layout.rows)[: case.layout.rows] for plan in plans)
    assert exact[3:] == bounded[3:] and set(exact) >= {1, 2}


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels keep their constants")
def test_more_spans_than_are_read_at_once(plans: list[module.Plans], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plans, "SCANNED", triton_plans.tl.constexpr(4))
    check(make_case(LONG_AMONG_SHORT, heads=2, kv_heads=1, width=64))
    assert max(shares_of(plans[0], 30)) == 6
    check(make_case([(30, 17), (3, 17), (0, 35), (5, 20), (1, 17)], heads=2, kv_heads=1, width=64))


def test_keys_and_values_are_written() -> None:
    case = on_device(make_case(MIXED, **SMALL))
    before = case.cache.k.clone()
    chosen = TritonAttention()
    chosen.attend(
        case.q,
        case.k,
        case.v,
        case.cache,
        case.layout,
        chosen.prepare(case.layout),
        scale=0.1,
        window=None,
        softcap=None,
    )
    real = case.layout.write_index >= case.layout.block_size  # void rows went to the null block
    at = case.layout.write_index[real]
    assert int(real.sum()) == case.layout.rows - 6
    assert torch.equal(case.cache.k.flatten(0, 1)[at], case.k[real])
    assert torch.equal(case.cache.v.flatten(0, 1)[at], case.v[real])
    untouched = torch.ones(len(before.flatten(0, 1)), dtype=torch.bool, device=before.device)
    untouched[case.layout.write_index] = False
    assert torch.equal(case.cache.k.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


def test_a_prepared_launch_follows_the_device() -> None:
    """What a graph replays: the launch of one moment, over the starts and slots of another."""
    first, later = make_case([(300, 5), (10, 5), (0, 40)], **SMALL), make_case([(7, 5), (302, 3), (60, 42)], **SMALL)
    assert first.layout.block_table.shape == later.layout.block_table.shape
    bounds = replace(
        on_device(first).layout, span_rows=(5, 5, 42), contexts=(305, 305, 305), max_context=305
    )  # the most that either holds
    prepared = (chosen := TritonAttention()).prepare(bounds)
    case = on_device(later)
    layout = replace(case.layout, span_rows=bounds.span_rows, contexts=bounds.contexts)
    out = chosen.attend(
        case.q, case.k, case.v, case.cache, layout, prepared, scale=64**-0.5, window=None, softcap=None
    ).cpu()
    for row, expected in dense(later, 64**-0.5, None, None).items():
        assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


BORDERS = [(59, 5), (62, 4), (63, 1), (64, 1), (124, 4), (126, 5), (40, 30)]  # splits end at 64 and 128


@pytest.mark.parametrize(
    ("spans", "window", "softcap"),
    [
        ([(130, 5), (0, 20), (63, 2), (200, 1)], None, None),
        ([(130, 5), (0, 20), (63, 2), (200, 1)], 60, 20.0),
        (BORDERS, None, None),
        ([*BORDERS[1:4], (126, 5)], 64, None),
        ([(640, 3), (0, 2)], 70, None),  # more splits than are merged at once
    ],
)
def test_batch_invariant(
    spans: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    plans: list[module.Plans],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each row alone, with a bound of its own, equals itself in company to the bit, over several splits."""
    monkeypatch.setattr(tiling, "SPLIT_TOKENS", 64)
    case = make_case(spans, **SMALL)
    together, prepared = attend(case, window=window, softcap=softcap, fixed=True)
    assert max(splits(prepared)) > 2
    assert {1, 2} <= set(shares_of(plans[0], case.layout.rows)) or len(spans) < 4
    check(case, window, softcap, fixed=True)
    for r, (start, rows) in enumerate(spans):
        first = int(case.layout.row_offsets[r])
        case.cache.k.view(-1, 2, 64)[case.layout.write_index] = case.k
        case.cache.v.view(-1, 2, 64)[case.layout.write_index] = case.v
        for j in range(0, rows, 2 if rows <= 5 else 9):
            row = slice(first + j, first + j + 1)
            slot = case.layout.slots[r : r + 1]
            layout = PassLayout.build(
                [1], [start + j + 1], slot, torch.tensor([start + j]), case.layout.block_table, 16
            )
            one = Case(layout, case.cache, [start + j], case.q[row], case.k[row], case.v[row], [])
            alone, _ = attend(one, window=window, softcap=softcap, fixed=True)
            assert torch.equal(alone, together[row])


@pytest.mark.parametrize(("heads", "kv_heads", "width", "half"), [(4, 2, 64, 32), (6, 1, 80, 40), (3, 3, 96, 20)])
def test_rotating_on_the_way(heads: int, kv_heads: int, width: int, half: int) -> None:
    """Rotation and writing in one launch give what they give one after the other."""
    case, twin = (on_device(make_case([(70, 4), (0, 18), (-1, 2)], heads, kv_heads, width)) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    angles = torch.randn(200, half, generator=generator).to(DEVICE)
    rotary = (angles.cos(), angles.sin())
    TorchKernels().rotate_(twin.q, twin.k, twin.layout.positions, *rotary)
    found = []
    for one, given in ((case, rotary), (twin, None)):
        chosen = TritonAttention()
        prepared = chosen.prepare(one.layout)
        q, k, v = one.q, one.k, one.v
        found.append(
            chosen.attend(q, k, v, one.cache, one.layout, prepared, scale=0.1, window=None, softcap=None, rotary=given)
        )
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert_close(case.cache.k[1:], twin.cache.k[1:])  # void rows meet in the null block
    assert torch.equal(case.cache.v[1:], twin.cache.v[1:])


def test_where_it_is_offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert available_backends("cuda") == ["triton", "torch"]
    assert backend("triton", DEVICE).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="does not run on cpu here"):
        backend("triton", "cpu")
    with pytest.raises(ConfigError, match="--sampler triton does not run on cpu here"):
        LLM(str(tiny("llama", tmp_path / "model")), device="cpu", sampler="triton")


def test_the_engine_writes_the_same_text(tmp_path: Path) -> None:
    verifier = tiny("llama", tmp_path / "verifier")
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "kv_memory": "16MB", "max_model_len": 100}
    prompts = [[5, 6, 7, 5, 6, 7, 5], list(range(10, 28))]
    texts = []
    for kernels in ("torch", "triton"):
        with LLM(
            str(verifier),
            draft="ngram",
            arch="unified",
            controller="fixed",
            max_draft=3,
            measure_costs=False,
            device=DEVICE,
            attention=kernels,
            sampler=kernels,
            **options,
        ) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_the_benchmark_checks_and_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load("attention")
    case = {"some": [(2, 2, 40), (1, 17, 3)]}
    device = torch.device(DEVICE)
    assert all(row["ok"] for row in benchmark.check(benchmark.TINY_SHAPES, case, device))
    monkeypatch.setattr(module, "_scales", lambda scale, softcap: (scale, 0.0))
    assert not any(row["ok"] for row in benchmark.check(benchmark.TINY_SHAPES, case, device))
