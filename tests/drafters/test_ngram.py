"""Prompt look-up on the device and its index on the host agree with a plain search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifypd.batch import DraftBatch, DraftSpan
from verifypd.drafters.ngram import NgramDrafter, NgramIndex, look_up
from verifypd.kernels import build
from verifypd.request import Request, SamplingParams
from verifypd.runtime.inputs import Slots


def search(tokens: list[int], shortest: int, longest: int, depth: int) -> list[int] | None:
    """Longest, then latest earlier match; a draft that reaches the end goes on with itself."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size <= len(tokens) and tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for step in range(depth):
                    text.append(text[end + step])
                return text[-depth:]
    return None


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_matches_a_plain_search(rows: list[list[int]], shortest: int, extra: int) -> None:
    width = max(map(len, rows)) + 3
    tokens = torch.full((len(rows), width), 9)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) for row in rows])
    drafts, found = look_up(tokens, lengths, shortest, shortest + extra, 5)
    for i, row in enumerate(rows):
        expected = search(row, shortest, shortest + extra, 5)
        assert bool(found[i]) == (expected is not None)
        if expected is not None:
            assert drafts[i].tolist() == expected
        index = NgramIndex(shortest)
        for end in range(1, len(row) + 1):
            index.extend(row[:end])
        assert index.matches == (expected is not None)


def test_a_repetition_of_any_period_is_drafted_whole() -> None:
    tokens = torch.tensor([[5, 6, 7, 5, 6, 7, 0, 0]])
    drafts, found = look_up(tokens, torch.tensor([6]), 2, 4, 7)
    assert found.tolist() == [True]
    assert drafts.tolist() == [[5, 6, 7, 5, 6, 7, 5]]


@pytest.mark.skipif(build.library() is None, reason="no C compiler")
@pytest.mark.parametrize("always", [False, True])
def test_in_one_call_of_c_it_finds_the_same(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(4)
    for _ in range(40):
        lengths = torch.randint(1, 24, (5,), generator=noise)
        texts = torch.randint(0, 3, (5, 32), generator=noise)
        wanted = torch.randint(0, 6, (5,), generator=noise).tolist()
        spans = tuple(DraftSpan(i, 0, 0, n, int(lengths[i]) + n) for i, n in enumerate(wanted))
        found = []
        for compiled in (True, False):
            slots = Slots(5, 32, 6, torch.device("cpu"))
            slots.tokens.copy_(texts)
            slots.lengths.copy_(lengths)
            with monkeypatch.context() as patch:
                if not compiled:
                    patch.setattr(build, "loaded", lambda: None)
                NgramDrafter(slots, 2, 4, max_draft=6, always=always).launch(DraftBatch("ngram", spans))
            found.append((slots.drafts.tolist(), slots.draft_lens.tolist()))
        assert found[0] == found[1]


def test_it_expects_more_while_copying_pays_and_less_when_it_does_not() -> None:
    slots = Slots(1, 64, 16, torch.device("cpu"))
    drafter = NgramDrafter(slots, 2, 4, max_draft=16)
    request = Request("a", [1, 2, 3, 4], SamplingParams(), seed=0, max_length=60)
    drafter.observe([request])
    assert drafter.expected(request) == 0, "nothing has occurred before"
    request.tokens += [1, 2]
    assert drafter.expected(request) == 0, "it was not told"
    drafter.observe([request])
    assert drafter.expected(request) == 4
    expected = []
    for verdict in ((4, 4), (8, 8), (16, 16), (16, 3), (4, 0), (1, 1)):
        request.last_draft = verdict
        expected.append(drafter.expected(request))
    assert expected == [8, 16, 16, 4, 1, 2]
    drafter.forget(request)
