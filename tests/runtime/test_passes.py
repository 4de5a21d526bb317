"""Shapes of padded passes: buckets, what fills them, and that the keys captured at start are those that passes have."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifypd.attention.base import PassLayout
from verifypd.batch import DraftSpan
from verifypd.buckets import CHUNKS, bucket, chunk_bucket, row_bucket, span_bucket
from verifypd.runtime.inputs import BlockTables, Slots, draft_layouts
from verifypd.runtime.passes import PassInputs, padding, pass_key, reachable
from verifypd.runtime.streams import keep_busy


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 2, 3, 5, 9, 12, 13, 17, 24, 25, 33, 49, 100, 129)] == [
        1, 2, 4, 8, 12, 12, 16, 24, 24, 32, 48, 64, 128, 192,
    ]  # fmt: skip
    assert [chunk_bucket(n) for n in (1, 64, 65, 384, 385, 513, 1000, 1025, 2049)] == [
        64, 64, 128, 384, 512, 640, 1024, 1152, 2304,
    ]  # fmt: skip
    assert [row_bucket(n) for n in (40, 100, 128, 129, 161, 200, 257, 500, 513, 641, 1024, 1025)] == [
        48, 128, 128, 160, 192, 224, 320, 512, 640, 768, 1024, 1280,
    ]  # fmt: skip
    assert [span_bucket(n) for n in (0, 8, 9, 33, 129)] == [8, 8, 32, 128, 512]
    for rounded in (bucket, row_bucket, chunk_bucket, span_bucket):
        assert all(rounded(rounded(n)) == rounded(n) >= n for n in range(1, 600))
    assert len({bucket(n) for n in range(1, 1025)}) < 20  # each is a graph
    assert len({row_bucket(n) for n in range(1, 1025)}) < 25
    assert len({chunk_bucket(n) for n in range(1, 2049)}) < 20


short_rows = st.integers(1, 9).flatmap(
    lambda widest: st.tuples(st.just(widest), st.lists(st.integers(1, widest), max_size=70))
)
chunk_rows = st.lists(st.integers(1, 300), max_size=CHUNKS)


@settings(max_examples=80)
@given(short_rows, chunk_rows)
def test_padding_fills_the_pass(case: tuple[int, list[int]], chunks: list[int]) -> None:
    widest, rows = case
    if not rows and not chunks:
        return
    key = pass_key(rows, widest, chunks)
    void, behind = padding(rows, key, chunks)
    assert len(rows) + len(void) == key.spans
    assert len(rows) + len(void) + len(chunks) + len(behind) == key.all_spans
    assert sum(rows) + sum(void) + sum(chunks) + sum(behind) == key.rows
    assert all(0 <= count <= widest for count in void)
    if not chunks:
        assert key.rows < 2 * sum(rows) + 1 and key.spans <= 2 * (len(rows) + -(-key.rows // widest))


@pytest.mark.parametrize(("spans", "widest", "most"), [(6, 3, 100), (12, 5, 0), (20, 5, 300), (0, 2, 200)])
def test_what_is_captured_at_start_is_what_passes_need(spans: int, widest: int, most: int) -> None:
    totals = [(n, rows) for n in range(spans + 1) for rows in range(n, n * widest + 1)]
    plain = {pass_key([1] * (n - 1) + [rows - n + 1], widest) for n, rows in totals if n}
    mixed = {
        pass_key([1] * (n - 1) + [rows - n + 1] if n else [], widest, [chunk])
        for n, rows in totals
        for chunk in range(1, most + 1)
    }
    keys = reachable(spans, widest, most)
    assert set(keys) == plain | mixed and len(keys) == len(set(keys))
    assert [key.rows for key in keys] == sorted((key.rows for key in keys), reverse=True)


def inputs_of(short: list[int], slots: list[int], chunks: list[int], starts: list[int]) -> PassInputs:
    inputs = PassInputs(pass_key(short, 3, chunks), torch.device("cpu"))
    inputs.fill(short, slots, [1] * len(slots), True, chunks, starts)
    return inputs


def test_inputs() -> None:
    inputs = inputs_of([3, 1, 2, 3], [5, 0, 2, 7], [], [])
    assert (inputs.key.rows, inputs.key.spans) == (12, 8)
    assert inputs.own.tolist() == [5, 0, 2, 7, -1, -1, -1, -1]
    assert inputs.offsets.tolist() == [0, 3, 4, 6, 9, 12, 12, 12, 12]
    assert inputs.depth.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 0, 0]
    assert inputs.drafts.tolist() == [2, 0, 1, 2, 0, 0, 0, 0]
    layout = inputs.layout(torch.full((8,), 40), torch.ones(8, 4, dtype=torch.int32), 16, 64)
    assert (layout.starts[:4] == 39).all() and (layout.starts[4:] < 0).all()
    assert (layout.write_index[9:] == 0).all()  # the null block
    assert (layout.write_index[:9] > 0).all()
    with pytest.raises(ValueError, match="do not fit"):
        padding([3, 3], pass_key([1], 3))


def test_inputs_of_a_loop_say_how_much_each_span_drafts() -> None:
    inputs = PassInputs(pass_key([2, 2, 2], 2), torch.device("cpu"))
    inputs.fill([2, 2, 2], [5, 0, 2], [2, 2, 2], False, drafts=[4, 0, 3])
    assert inputs.drafts.tolist() == [4, 0, 3, 0]
    assert not inputs.depth.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inputs_filled_while_copies_are_under_way() -> None:
    """No buffer on the host is written again before its copy has been made, however far the host is ahead."""
    device = torch.device("cuda")
    inputs, slots = PassInputs(pass_key([2, 1], 3), device), range(40)
    keep_busy(device, 0.05)
    copies = []
    for slot in slots:
        inputs.fill([2, 1], [slot, slot + 1], [1, 1], True)
        copies.append(inputs.slots[:2].clone())
    assert torch.stack(copies).tolist() == [[slot, slot + 1] for slot in slots]


def test_inputs_with_chunks() -> None:
    """Chunks begin where the host says, behind the short spans and their padding; the last span takes what is left."""
    inputs = inputs_of([2, 1], [5, 0, 6, 7], [20, 4], [16, 0])
    key = inputs.key
    assert (key.spans, key.rows, key.all_spans) == (8, 64, 8 + CHUNKS + 1)
    assert inputs.own.tolist() == [5, 0, *[-1] * 6, 6, 7, *[-1] * (CHUNKS - 1)]
    assert inputs.offsets.tolist() == [0, 2, *[3] * 7, 23, *[27] * (CHUNKS - 1), 64]
    assert inputs.depth.tolist() == [0, 1, 0, *[0] * 61]
    layout = inputs.layout(torch.full((8,), 40), torch.ones(8, 4, dtype=torch.int32), 16, 64)
    assert layout.positions[:27].tolist() == [39, 40, 39, *range(16, 36), *range(4)]
    assert (layout.write_index[27:] == 0).all() and (layout.write_index[:27] > 0).all()
    with pytest.raises(ValueError, match="do not fit"):
        padding([], key, [1] * (CHUNKS + 1))


def test_block_tables_bring_over_what_changed() -> None:
    """Rows grow, change hands and shrink; entries past a row's blocks are the null block again."""
    tables = BlockTables(3, 80, 16, torch.device("cpu"))
    tables.write(1, [7, 8])
    assert not tables.data.any()  # until it is flushed
    tables.flush()
    tables.write(1, [7, 8, 9])
    tables.write(2, [4])
    tables.flush()
    assert tables.data.tolist() == [[0] * 5, [7, 8, 9, 0, 0], [4, 0, 0, 0, 0]]
    tables.write(1, [5])
    tables.write(2, [3, 2, 1, 6, 5])
    tables.flush()
    assert tables.data.tolist() == [[0] * 5, [5, 0, 0, 0, 0], [3, 2, 1, 6, 5]]


def test_the_passes_of_a_draft_loop_are_those_built_one_by_one() -> None:
    cpu = torch.device("cpu")
    slots, tables = Slots(4, 40, 5, cpu), BlockTables(4, 40, 4, cpu)
    slots.lengths.copy_(torch.tensor([7, 0, 12, 30]))
    for slot in (0, 2, 3):
        tables.write(slot, range(10 * slot + 1, 10 * slot + 11))
    tables.flush()
    spans = [
        DraftSpan(slot, lag=1, rows=1, drafts=drafts, context=20 + slot) for slot, drafts in ((2, 5), (0, 3), (3, 1))
    ]
    layouts = draft_layouts(spans, torch.tensor([2, 0, 3]), slots, tables)
    assert [layout.slots.tolist() for layout in layouts] == [[2, 0], [2, 0], [2], [2]]
    for depth, found in enumerate(layouts, 1):
        count = found.spans
        built = PassLayout.build(
            [1] * count,
            [span.context for span in spans[:count]],
            found.slots,
            slots.lengths[found.slots] - 1 + depth,
            tables.data,
            tables.block_size,
        )
        for field in dataclasses.fields(PassLayout):
            torch.testing.assert_close(getattr(found, field.name), getattr(built, field.name), rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "start"), [(1, 9), (6, 3), (5, -2)])
def test_a_span_alone_lies_where_it_lies_among_others(rows: int, start: int) -> None:
    table = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    slots, starts = torch.tensor([1, 0]), torch.tensor([start, 0])
    alone = PassLayout.build([rows], [20], slots[:1], starts[:1], table, 4)
    among = PassLayout.build([rows, 3], [20, 20], slots, starts, table, 4)
    assert alone.row_offsets.tolist() == [0, rows] and alone.row_span.tolist() == [0] * rows
    assert alone.positions.tolist() == among.positions[:rows].tolist() == [max(start + j, 0) for j in range(rows)]
    written = [0 if start + j < 0 else (11 + (start + j) // 4) * 4 + (start + j) % 4 for j in range(rows)]
    assert alone.write_index.tolist() == among.write_index[:rows].tolist() == written
