"""Who owns which KV block. Host bookkeeping only: knows counts and digests, nothing of tensors or scheduling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush


class BlockPool:
    """Blocks of one model's cache: reserved by owners, shared by equal prefixes, kept after release until needed.

    Every block is in exactly one place: held by one or more owners, free, or cached (free, but its content is known).
    """

    def __init__(self, blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.total = blocks - 1  # block 0 is the null block
        self.prefix_cache = prefix_cache
        self.free = list(range(1, blocks))  # a heap: blocks that lie close together are read faster
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.owners: dict[int, int] = {}  # block -> how many requests hold it
        self.held: dict[int, list[int]] = {}  # owner -> its blocks in order
        self.digest_of: dict[int, bytes] = {}
        self.by_digest: dict[bytes, int] = {}
        self.committed: dict[int, int] = {}  # owner -> how many of its blocks were committed

    @property
    def available(self) -> int:
        """Blocks that can be reserved now."""
        return len(self.free) + len(self.cached)

    @property
    def used(self) -> int:
        """Blocks somebody holds."""
        return len(self.owners)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def missing(self, owner: int, tokens: int) -> int:
        """Blocks `owner` still lacks to hold `tokens` tokens."""
        return max(0, self.blocks_for(tokens) - len(self.held.get(owner, ())))

    def can_reserve(self, owner: int, tokens: int) -> bool:
        """Whether `reserve` would succeed."""
        return self.missing(owner, tokens) <= self.available

    def reserve(self, owner: int, tokens: int) -> bool:
        """Give `owner` blocks for `tokens` tokens in all; returns whether its table changed."""
        missing = self.missing(owner, tokens)
        if missing > self.available:
            raise RuntimeError(f"{missing} blocks wanted, {self.available} available: ask can_reserve first")
        blocks = self.held.setdefault(owner, [])
        for _ in range(missing):
            block = self._take()
            self.owners[block] = 1
            blocks.append(block)
        return missing > 0

    def adopt(self, owner: int, digests: Sequence[bytes]) -> int:
        """Start `owner` on the longest cached prefix; returns the blocks it shares. `owner` must hold nothing yet."""
        if self.held.get(owner):
            raise RuntimeError(f"owner {owner} holds blocks already")
        blocks = self.held.setdefault(owner, [])
        if not self.prefix_cache:
            return 0
        for digest in digests:
            block = self.by_digest.get(digest)
            if block is None:
                break
            self.cached.pop(block, None)
            self.owners[block] = self.owners.get(block, 0) + 1
            blocks.append(block)
        self.committed[owner] = len(blocks)
        return len(blocks)

    def matching(self, digests: Sequence[bytes]) -> tuple[int, int]:
        """Blocks a prefix would share, and how many of those are not held by anybody now."""
        if not self.prefix_cache:
            return 0, 0
        shared = idle = 0
        for digest in digests:
            block = self.by_digest.get(digest)
            if block is None:
                break
            shared += 1
            idle += block in self.cached
        return shared, idle

    def commit(self, owner: int, digests: Sequence[bytes]) -> None:
        """Make the first blocks of `owner` findable: their content is confirmed and will not change."""
        if not self.prefix_cache:
            return
        blocks = self.held.get(owner, [])
        for index in range(self.committed.get(owner, 0), min(len(digests), len(blocks))):
            block, digest = blocks[index], digests[index]
            self.committed[owner] = index + 1
            if block not in self.digest_of and digest not in self.by_digest:
                self.digest_of[block] = digest
                self.by_digest[digest] = block

    def release(self, owner: int) -> None:
        """Return everything `owner` holds; blocks with known content stay findable until somebody needs them."""
        self.committed.pop(owner, None)
        for block in reversed(self.held.pop(owner, [])):  # the end of a prefix is forgotten before its start
            self.owners[block] -= 1
            if self.owners[block]:
                continue
            del self.owners[block]
            if block in self.digest_of:
                self.cached[block] = None
            else:
                heappush(self.free, block)

    def _take(self) -> int:
        if self.free:
            return heappop(self.free)
        block, _ = self.cached.popitem(last=False)
        del self.by_digest[self.digest_of.pop(block)]
        return block

    def check(self) -> None:
        """Prove that every block has an owner or is free, and that the digests agree. Raises AssertionError."""
        counts: dict[int, int] = {}
        for blocks in self.held.values():
            assert len(set(blocks)) == len(blocks), "an owner holds a block twice"
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self.owners, "owner counts differ from what is held"
        places = [*self.free, *self.cached, *self.owners]
        assert len(places) == len(set(places)), "a block is in two places"
        assert set(places) == set(range(1, self.total + 1)), "a block is lost"
        assert all(block in self.digest_of for block in self.cached), "a cached block has no digest"
        assert {digest: block for block, digest in self.digest_of.items()} == self.by_digest, "digests disagree"
