"""One launch prepares a model's inputs as torch does, to the bit: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from verifypd.attention.base import PassLayout
from verifypd.runtime.inputs import BlockTables, Slots
from verifypd.runtime.model_inputs import ROWS_OF_A_PROGRAM, model_inputs
from verifypd.runtime.passes import ModelInputs, PassInputs, PassKey, pass_key

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, CAPACITY, DRAFTS, WIDEST = 12, 90, 4, 5

on_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


def world(first: bool) -> tuple[Slots, BlockTables]:
    """Slots with texts of many lengths, all tokens and blocks different; some begin late where there is a `first`."""
    generator = torch.Generator().manual_seed(3)
    slots, tables = (
        Slots(SLOTS, CAPACITY, DRAFTS, DEVICE),
        BlockTables(SLOTS, CAPACITY, 4, DEVICE, 1 if first else None),
    )
    slots.tokens.copy_(torch.randperm(SLOTS * CAPACITY, generator=generator).view(SLOTS, CAPACITY))
    slots.drafts.copy_(5000 + torch.randperm(SLOTS * DRAFTS, generator=generator).view(SLOTS, DRAFTS))
    slots.lengths.copy_(torch.tensor([7, 1, 12, 80, 33, 2, 64, 5, 16, 17, 40, 3]))
    tables.data.copy_(1 + torch.randperm(tables.data.numel(), generator=generator).view_as(tables.data))
    if first:
        tables.begin(2, 11)
        tables.begin(3, 79)
        tables.begin(8, 40)  # behind all of its rows
    return slots, tables


def in_torch(inputs: PassInputs, slots: Slots, tables: BlockTables, depth: int = 0) -> ModelInputs:
    """The reference."""
    where = slots.lengths, tables.data, tables.block_size, slots.capacity, tables.first
    if depth:
        return ModelInputs(slots.drafts[inputs.slots, depth - 1], inputs.step(depth, *where))
    layout = inputs.layout(*where)
    return ModelInputs(inputs.ids(layout, slots.tokens, slots.drafts), layout)


def same(found: ModelInputs, expected: ModelInputs) -> None:
    assert torch.equal(found.ids, expected.ids) and found.ids.dtype == torch.int64
    for field in dataclasses.fields(PassLayout):
        one, other = getattr(found.layout, field.name), getattr(expected.layout, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.is_contiguous() and torch.equal(one, other), field.name
        else:
            assert one == other, field.name


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    ("short", "chunks", "starts"),
    [
        ([5, 1, 3, 2], [], []),  # ragged, with void spans behind
        ([1], [], []),
        ([2, 1, 5], [20, 9], [0, 31]),  # beside prompts, which begin where the host says
        ([1, 2], [7, 6, 1], [12, -1, 3]),  # or behind what their slot holds
        ([], [30, 44], [2, 0]),
        ([], [], []),  # nothing but void rows
    ],
)
def test_passes(short: list[int], chunks: list[int], starts: list[int], drafted: bool, first: bool) -> None:
    slots, tables = world(first)
    inputs = PassInputs(pass_key(short or [1] * (not chunks), WIDEST, chunks), DEVICE)
    owners = [3, 2, 8, 0, 10, 4][: len(short) + len(chunks)]
    back = [1, 4, 9, 2, 1, 6][: len(owners)]
    inputs.fill(short, owners, [1] * len(owners) if drafted else back, drafted, chunks, starts)
    found = model_inputs(inputs, slots, tables)
    same(found, in_torch(inputs, slots, tables))
    if drafted and max(short, default=0) > 1:
        assert (found.ids >= 5000).sum() == sum(short) - len(short)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("spans", [1, 3, 8])
def test_steps_of_a_loop(spans: int, first: bool) -> None:
    """Void spans among them, and slots that begin behind the first of the drafts."""
    slots, tables = world(first)
    if tables.first is not None:
        tables.begin(4, 34)
    inputs = PassInputs(PassKey(8, 16, 2), DEVICE)
    owners = [4, 3, 0, 9, 2, 6, 1, 8][:spans]
    inputs.fill([2] * spans, owners, [2] * spans, False)
    same(model_inputs(inputs, slots, tables), in_torch(inputs, slots, tables))
    for depth in range(1, DRAFTS):
        found = model_inputs(inputs, slots, tables, depth)
        same(found, in_torch(inputs, slots, tables, depth))
        assert (found.layout.starts[spans:] == -1).all() and not found.layout.write_index[spans:].any()


@pytest.mark.parametrize("spans", [ROWS_OF_A_PROGRAM // 2, ROWS_OF_A_PROGRAM + 22])
def test_more_than_one_program_holds(spans: int) -> None:
    """More rows than spans, and more spans than rows."""
    slots, tables = world(False)
    for key, short in ((pass_key([1] * spans, WIDEST), [1] * spans), (PassKey(512, 64, WIDEST, 8), [1] * 40)):
        inputs = PassInputs(key, DEVICE)
        inputs.fill(short, [n % SLOTS for n in range(len(short))], [1] * len(short), True)
        same(model_inputs(inputs, slots, tables), in_torch(inputs, slots, tables))
    inputs = PassInputs(PassKey(spans, 2 * spans, 2), DEVICE)
    inputs.fill([2] * spans, [n % SLOTS for n in range(spans)], [2] * spans, False)
    same(model_inputs(inputs, slots, tables, 2), in_torch(inputs, slots, tables, 2))


@pytest.mark.gpu
@on_a_gpu
def test_a_captured_pass_reads_what_lies_there_when_it_is_replayed() -> None:
    """Inputs, lengths, drafts and blocks may all be others by then; one launch follows the other early."""
    slots, tables = world(True)
    inputs = PassInputs(pass_key([3, 1, 2], WIDEST, [9]), DEVICE)
    loop = PassInputs(PassKey(4, 8, 2), DEVICE)
    inputs.fill([1], [0], [1], True)
    loop.fill([2], [0], [2], False)
    model_inputs(inputs, slots, tables), model_inputs(loop, slots, tables), model_inputs(loop, slots, tables, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [model_inputs(inputs, slots, tables), model_inputs(loop, slots, tables)]
        found += [model_inputs(loop, slots, tables, depth) for depth in range(1, DRAFTS)]
    for shift in range(3):
        inputs.fill([3, 1, 2], [3, 5 + shift, 0, 9], [1, 1, 1, 4], True, [9], [shift])
        loop.fill([2, 2, 2], [4, 3, 8 + shift], [2, 2, 2], False)
        slots.lengths.add_(shift)
        slots.drafts.add_(shift)
        tables.data.copy_(tables.data.flip(0))
        graph.replay()
        expected = [in_torch(inputs, slots, tables), *(in_torch(loop, slots, tables, d) for d in range(DRAFTS))]
        for one, other in zip(found, expected, strict=True):
            same(one, other)
