"""Block ownership: transactions, sharing, eviction, and that `check` notices what it should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifypd.kv.blocks import BlockPool
from verifypd.kv.prefix import PrefixDigests


def digests(tokens: list[int], block_size: int = 4) -> list[bytes]:
    return PrefixDigests(block_size).upto(tokens, len(tokens) // block_size)


def test_reserve_gives_what_is_missing_and_release_returns_it() -> None:
    pool = BlockPool(9, 4)
    assert pool.reserve(1, 5)
    assert not pool.reserve(1, 8), "two blocks hold eight tokens already"
    assert pool.reserve(1, 9)
    assert len(pool.held[1]) == 3 and 0 not in pool.held[1]
    pool.check()
    pool.release(1)
    assert pool.available == 8
    pool.check()


def test_reserve_refuses_more_than_there_is() -> None:
    pool = BlockPool(3, 4)
    assert not pool.can_reserve(1, 9)
    with pytest.raises(RuntimeError, match="can_reserve"):
        pool.reserve(1, 9)
    pool.check()


def test_equal_prefix_is_shared_and_survives_release() -> None:
    pool = BlockPool(9, 4)
    tokens = list(range(10))
    pool.reserve(1, 10)
    pool.commit(1, digests(tokens))
    assert pool.adopt(2, digests(tokens)) == 2
    assert pool.held[2] == pool.held[1][:2]
    pool.release(1)
    pool.release(2)
    pool.check()
    assert pool.adopt(3, digests(tokens)) == 2, "content stays findable while nobody needs the room"
    pool.check()


def test_a_different_start_shares_nothing() -> None:
    pool = BlockPool(9, 4)
    pool.reserve(1, 8)
    pool.commit(1, digests([1, 2, 3, 4, 5, 6, 7, 8]))
    assert pool.adopt(2, digests([9, 2, 3, 4, 5, 6, 7, 8])) == 0
    assert pool.adopt(3, digests([1, 2, 3, 4, 5, 6, 7, 9])) == 1


def test_cached_blocks_are_evicted_oldest_first_when_room_is_needed() -> None:
    pool = BlockPool(5, 4)
    for owner, start in ((1, 0), (2, 100)):
        pool.reserve(owner, 8)
        pool.commit(owner, digests(list(range(start, start + 8))))
        pool.release(owner)
    pool.reserve(3, 8)  # takes the room of owner 1
    assert pool.matching(digests(list(range(8))))[0] == 0
    assert pool.matching(digests(list(range(100, 108)))) == (2, 2)
    pool.check()


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(5, 4, prefix_cache=False)
    pool.reserve(1, 8)
    pool.commit(1, digests(list(range(8))))
    pool.release(1)
    assert pool.adopt(2, digests(list(range(8)))) == 0
    assert len(pool.free) == 4


@pytest.mark.parametrize("harm", ["lose", "share", "forget"])
def test_check_notices(harm: str) -> None:
    pool = BlockPool(5, 4)
    pool.reserve(1, 8)
    if harm == "lose":
        pool.free.pop()
    elif harm == "share":
        pool.free.append(pool.held[1][0])
    else:
        pool.held[1].pop()
    with pytest.raises(AssertionError):
        pool.check()


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from("arcx"), st.integers(0, 5), st.integers(0, 3), st.integers(1, 30)), max_size=60)
)
def test_any_sequence_of_operations_keeps_the_invariant(operations: list[tuple[str, int, int, int]]) -> None:
    pool = BlockPool(12, 4)
    texts: dict[int, list[int]] = {}
    for kind, owner, text, length in operations:
        if kind == "a" and owner not in pool.held:
            texts[owner] = [text] * 40
            pool.adopt(owner, digests(texts[owner][:length]))
        elif kind == "r" and owner in pool.held and pool.can_reserve(owner, length):
            pool.reserve(owner, length)
        elif kind == "c" and owner in pool.held:
            full = len(pool.held[owner]) * 4
            pool.commit(owner, digests(texts[owner][: min(full, length)]))
        elif kind == "x":
            pool.release(owner)
        pool.check()
    for owner in list(pool.held):
        pool.release(owner)
    pool.check()
    assert pool.available == 11


def test_the_lowest_free_blocks_go_first() -> None:
    """Blocks that lie together are read faster: what came back in any order is given out in order again."""
    pool = BlockPool(9, 4, prefix_cache=False)
    for owner in (1, 2, 3):
        pool.reserve(owner, 8)
    for owner in (2, 3, 1):
        pool.release(owner)
    pool.reserve(4, 32)
    assert pool.held[4] == list(range(1, 9))
