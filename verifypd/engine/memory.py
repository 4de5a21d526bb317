"""KV blocks of requests over both models' pools. Knows requests, pools and tables; nothing of plans or models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from verifypd.kv.blocks import BlockPool
from verifypd.kv.prefix import PrefixDigests
from verifypd.request import Request
from verifypd.runtime.inputs import BlockTables


@dataclass(frozen=True, slots=True)
class PagedPool:
    """Block ownership on the host and the block table on the device, of one model."""

    blocks: BlockPool
    tables: BlockTables


class RequestMemory:
    """Reserves, shares and returns blocks in all pools at once: a request has room in both models or in none."""

    def __init__(
        self, verifier: PagedPool, draft: PagedPool | None, capacity: int, head_origin: int | None = None
    ) -> None:
        """head_origin: position of the first row of a draft head; None: there is none."""
        self.verifier = verifier
        self.head_origin = head_origin
        self.draft = draft
        self.capacity = capacity  # tokens one request may reserve
        self._pools = [verifier] if draft is None else [verifier, draft]
        self._digests: dict[int, PrefixDigests] = {}
        self._read: set[int] = set()  # blocks of a draft head whose keys and values are written, not only its features
        self._marked: dict[int, int] = {}  # owner -> how many of its first blocks are among them

    def admit(self, request: Request, slot: int, spare: int) -> bool:
        """Give a waiting request room for its known tokens and the next one, keeping `spare` blocks for those running.

        What the prefix caches hold of it counts as computed and drafted.
        """
        known = len(request.tokens)
        digests = self._prefix(request, known - 1)
        usable = [self._usable(request, pool, digests) for pool in self._pools]
        for pool, wanted in zip(self._pools, usable, strict=True):
            shared, idle = pool.blocks.matching(wanted)
            if pool.blocks.blocks_for(known + 1) - shared + spare > pool.blocks.available - idle:
                return False
        cached = []
        for pool, wanted in zip(self._pools, usable, strict=True):
            shared = pool.blocks.adopt(request.order, wanted)
            self._reserve(pool, request.order, known + 1)
            pool.tables.write(slot, pool.blocks.held[request.order])
            cached.append(shared * pool.blocks.block_size)
        if not request.metrics.preemptions:  # who comes back finds what it wrote itself
            request.metrics.cached_tokens = min(cached[0], request.prompt_len)
        lag = known - cached[-1] if self.draft else 0
        if self.draft is not None and self.head_origin is not None:
            adopted = self.draft.blocks.held[request.order][: cached[-1] // self.draft.blocks.block_size]
            self._marked[request.order] = len(list(takewhile(self._read.__contains__, adopted)))
            begun = self.begin_head(request, slot, 0 if cached[-1] == cached[0] else cached[0])
            lag = known - max(begun, self._marked[request.order] * self.draft.blocks.block_size)
        request.admitted(cached[0], lag)
        return True

    def begin_head(self, request: Request, slot: int, position: int) -> int:
        """The draft head has features of the request from `position` on. Returns the first token it can read: a row
        takes the feature of the position before it."""
        assert self.draft is not None and self.head_origin is not None
        first = position + 1 if position else self.head_origin
        request.late_features = position > 0
        self.draft.tables.begin(slot, first)
        return first

    def begin_heads_at(self, slots: Sequence[int], lengths: Tensor) -> None:
        """The same of slots that decode: from their last token on, lengths [S] being known to the device alone."""
        assert self.draft is not None
        self.draft.tables.begin_at(slots, lengths)

    def holds(self, request: Request, tokens: int) -> bool:
        """Whether it has room for `tokens` tokens in all."""
        tokens = min(tokens, self.capacity)
        for pool in self._pools:
            blocks = pool.blocks
            if len(blocks.held.get(request.order, ())) * blocks.block_size < tokens:
                return False
        return True

    def reserve(self, request: Request, tokens: int) -> bool:
        """Make room for `tokens` tokens in all; False, and nothing changed, when a pool cannot."""
        if self.holds(request, tokens):
            return True
        tokens = min(tokens, self.capacity)
        missing = [pool.blocks.missing(request.order, tokens) for pool in self._pools]
        if any(count > pool.blocks.available for count, pool in zip(missing, self._pools, strict=True)):
            return False
        assert request.slot is not None
        for pool in self._pools:
            pool.tables.extend(request.slot, self._reserve(pool, request.order, tokens))
        return True

    def publish(self) -> None:
        """Bring new blocks to the device: passes launched from now on find them."""
        for pool in self._pools:
            pool.tables.flush()

    def commit(self, request: Request, computed: int) -> None:
        """Make full blocks findable for others: `computed` confirmed tokens are in the verifier's cache."""
        if not self.verifier.blocks.prefix_cache:
            return  # nobody looks for them
        self._commit(self.verifier, request, computed)
        if self.draft is None:
            return
        read = min(len(request.tokens), request.length_floor - request.draft_lag)
        if self.head_origin is None:
            self._commit(self.draft, request, read)
        elif not (request.unread or request.late_features):  # features come with the verifier's passes, keys later
            self._commit(self.draft, request, computed)
            blocks = self.draft.blocks
            full, marked = min(read, computed) // blocks.block_size, self._marked.get(request.order, 0)
            if full > marked:
                self._read.update(blocks.held[request.order][marked:full])
                self._marked[request.order] = full

    def _reserve(self, pool: PagedPool, owner: int, tokens: int) -> list[int]:
        """Give `owner` blocks for `tokens` tokens in all; returns those that it did not have before."""
        before = len(pool.blocks.held.get(owner, ()))
        fresh = pool.blocks.held[owner][before:] if pool.blocks.reserve(owner, tokens) else []
        if fresh and pool is self.draft:
            self._read.difference_update(fresh)
        return fresh

    def _commit(self, pool: PagedPool, request: Request, tokens: int) -> None:
        full = tokens // pool.blocks.block_size
        if full > pool.blocks.committed.get(request.order, 0):  # most steps fill no block
            pool.blocks.commit(request.order, self._prefix(request, tokens))

    def has_room(self, lengths: Sequence[int]) -> bool:
        """Whether new requests that come to these lengths, in tokens, would all fit without anybody giving way."""
        return all(
            sum(map(pool.blocks.blocks_for, lengths)) + len(lengths) <= pool.blocks.available for pool in self._pools
        )

    @contextmanager
    def unshared(self) -> Iterator[None]:
        """Within the block no prefix is shared or made findable: what caches then hold need not be true."""
        kept = [pool.blocks.prefix_cache for pool in self._pools]
        for pool in self._pools:
            pool.blocks.prefix_cache = False
        try:
            yield
        finally:
            for pool, shared in zip(self._pools, kept, strict=True):
                pool.blocks.prefix_cache = shared

    def release(self, request: Request) -> None:
        """Return everything; the request may come back later."""
        self._marked.pop(request.order, None)
        for pool in self._pools:
            pool.blocks.release(request.order)

    def forget(self, request: Request) -> None:
        """The request has ended: drop its digests."""
        self._digests.pop(request.order, None)

    @property
    def remembers(self) -> int:
        """How many requests it keeps digests of."""
        return len(self._digests)

    def check(self) -> None:
        """Prove that no block is lost or owned twice."""
        for pool in self._pools:
            pool.blocks.check()

    def _prefix(self, request: Request, tokens: int) -> list[bytes]:
        blocks = self.verifier.blocks
        if not blocks.prefix_cache:
            return []
        digests = self._digests.setdefault(request.order, PrefixDigests(blocks.block_size))
        return digests.upto(request.tokens, max(0, tokens) // blocks.block_size)

    def _usable(self, request: Request, pool: PagedPool, digests: list[bytes]) -> list[bytes]:
        """Prompt logprobs need every row of the verifier, so such a request takes no prefix from its cache.

        A draft head takes what the verifier takes or nothing: of a prefix that it has in part, it begins behind.
        """
        if pool is self.verifier or self.head_origin is None:
            return [] if pool is self.verifier and request.prompt_logprobs is not None else digests
        wanted = self._usable(request, self.verifier, digests)
        shared = self.verifier.blocks.matching(wanted)[0]
        return digests[:shared] if pool.blocks.matching(digests)[0] >= shared else []
