"""One memory budget for both models, made at start and printed. Knows bytes; allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from verifypd.errors import MemoryBudgetError


@dataclass(frozen=True, slots=True)
class Budget:
    """Where the memory goes, in bytes. `parts` holds (name, bytes) without the KV blocks."""

    parts: tuple[tuple[str, int], ...]
    blocks: int  # per pool, the null block included
    block_size: int
    verifier_block_bytes: int
    draft_block_bytes: int  # 0 without a draft model

    @property
    def kv_bytes(self) -> int:
        """Bytes of both pools."""
        return self.blocks * (self.verifier_block_bytes + self.draft_block_bytes)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.kv_bytes + sum(size for _, size in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens the KV blocks hold."""
        return (self.blocks - 1) * self.block_size

    def __str__(self) -> str:
        rows = [*self.parts, ("verifier KV", self.blocks * self.verifier_block_bytes)]
        if self.draft_block_bytes:
            rows.append(("draft KV", self.blocks * self.draft_block_bytes))
        listed = ", ".join(f"{name} {show(size)}" for name, size in rows if size)
        return f"memory {show(self.total)}: {listed} ({self.tokens:,} tokens)"


def plan_budget(
    *,
    parts: tuple[tuple[str, int], ...],
    kv_bytes: int,
    block_size: int,
    verifier_block_bytes: int,
    draft_block_bytes: int,
    request_tokens: int,
    max_model_len: int,
    most_tokens: int,
) -> Budget:
    """Split `kv_bytes` between the pools: both hold the same tokens, so both get the same number of blocks.

    `request_tokens` is what one request of `max_model_len` reserves; `most_tokens` is more than all slots can use.
    """
    each = verifier_block_bytes + draft_block_bytes
    needed = -(-request_tokens // block_size) + 1
    blocks = min(kv_bytes // each, -(-most_tokens // block_size) + 1)
    if blocks < needed:
        fits = max(0, (kv_bytes // each - 1) * block_size - (request_tokens - max_model_len))
        advice = f"or use --max-model-len {fits}" if fits >= 16 else "or less with a smaller --max-model-len"
        raise MemoryBudgetError(
            f"{show(kv_bytes)} of KV memory cannot hold one request of {max_model_len} tokens, which takes "
            f"{show(needed * each)}: give --kv-memory {show(needed * each, up=True)} {advice}"
        )
    return Budget(parts, blocks, block_size, verifier_block_bytes, draft_block_bytes)


def show(size: int, *, up: bool = False) -> str:
    """Bytes for people, e.g. 1.25GiB; `up` rounds up so that the figure can be used as a setting."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    if up:
        value = -(-value * 100 // 1) / 100
    return f"{value:.2f}".rstrip("0").rstrip(".") + units[0]
