"""Names for block contents: a digest per full block that covers everything before it. Knows no blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


class PrefixDigests:
    """Digests of the full blocks of one growing token sequence, made once and shared by every pool.

    A cryptographic digest and not a hash: two prefixes that collide would share a cache block and corrupt both texts.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._digests: list[bytes] = []

    def upto(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Digests of the first `blocks` full blocks of `tokens`; the sequence must extend the one seen before."""
        while len(self._digests) < blocks:
            first = len(self._digests) * self.block_size
            content = array("q", tokens[first : first + self.block_size])
            before = self._digests[-1] if self._digests else b""
            self._digests.append(blake2b(before + content.tobytes(), digest_size=16).digest())
        return self._digests[:blocks]
