"""What the programs of a pass share: long contexts are split, layers have one plan, and launches follow the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton")

from tests.attention.test_backends import Case, dense, make_case
from tests.attention.test_triton import DEVICE, SMALL, attend, check, on_device, splits
from verifypd.attention import PassLayout, tiling, triton_plans
from verifypd.attention import triton as module
from verifypd.attention.triton import TritonAttention
from verifypd.kernels.launch import INTERPRETED_PROCESSORS
from verifypd.kv.pool import LayerCache
from verifypd.runtime.passes import PassInputs, pass_key


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


BORDERS = [(59, 5), (62, 4), (63, 1), (64, 1), (124, 4), (126, 5), (40, 30)]  # splits end at 64 and 128
LONG_AMONG_SHORT = [(30, 3), (5, 1), (700, 5), (0, 2), (60, 4), (-2, 5), (31, 1), (90, 2), (-4, 4), (12, 3)]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels keep their constants")
def test_more_spans_than_are_read_at_once(plans: list[module.Plans], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plans, "SCANNED", triton_plans.tl.constexpr(4))
    check(make_case(LONG_AMONG_SHORT, heads=2, kv_heads=1, width=64))
    assert max(shares_of(plans[0], 30)) == 6
    check(make_case([(30, 17), (3, 17), (0, 35), (5, 20), (1, 17)], heads=2, kv_heads=1, width=64))


@pytest.mark.slow
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
