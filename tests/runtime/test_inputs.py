"""The layout of a pass of decode spans is the same in one call of C and in torch."""

from __future__ import annotations

import pytest
import torch

from verifypd.batch import VerifySpan
from verifypd.kernels import build
from verifypd.runtime.inputs import BlockTables, Slots, verify_ids, verify_layout

CPU = torch.device("cpu")
FIELDS = ("row_offsets", "row_span", "slots", "starts", "positions", "write_index", "block_table")
pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler")


def slots_of(lengths: list[int]) -> tuple[Slots, BlockTables]:
    noise = torch.Generator().manual_seed(1)
    slots, tables = Slots(len(lengths), 40, 4, CPU), BlockTables(len(lengths), 40, 8, CPU, 0)
    slots.tokens.copy_(torch.randint(3, 99, slots.tokens.shape, generator=noise))
    slots.drafts.copy_(torch.randint(3, 99, slots.drafts.shape, generator=noise))
    slots.lengths.copy_(torch.tensor(lengths))
    for slot in range(len(lengths)):
        tables.write(slot, range(1 + 5 * slot, 6 + 5 * slot))
    tables.flush()
    return slots, tables


def decode(slot: int, drafts: int, context: int) -> VerifySpan:
    return VerifySpan(slot, drafts + 1, drafts, None, True, context)


def test_decode_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, tables = slots_of([1, 33, 17, 9])
    tables.begin(2, 18)  # its last token lies before what the slot holds: a void row
    for spans in ([decode(1, 4, 38)], [decode(3, 0, 10), decode(0, 2, 4), decode(2, 3, 21)]):
        ours = verify_layout(spans, slots, tables)
        ids = verify_ids(spans, ours, slots)
        with monkeypatch.context() as patch:
            patch.setattr(build, "loaded", lambda: None)
            theirs = verify_layout(spans, slots, tables)
            assert torch.equal(ids, verify_ids(spans, theirs, slots))
        for name in FIELDS:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for name in ("span_rows", "contexts", "max_context", "block_size"):
            assert getattr(ours, name) == getattr(theirs, name)


def test_rows_outside_a_slot_are_errors() -> None:
    slots, tables = slots_of([40, 9])
    with pytest.raises(IndexError, match="outside its slot"):
        verify_layout([decode(0, 4, 45)], slots, tables)
    spans = [decode(1, 5, 15)]  # more drafts than a slot holds
    with pytest.raises(IndexError, match="behind the tokens"):
        verify_ids(spans, verify_layout(spans, slots, tables), slots)
