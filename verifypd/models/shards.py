"""How a model is divided among ranks, each of which holds some heads and some of every MLP. Knows shapes; no process.

A shard is a model of fewer heads and a narrower MLP. What its attention and its MLPs give are parts of sums over all
ranks. The vocabulary is not divided: rank 0 alone embeds tokens and computes logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verifypd.errors import ConfigError
from verifypd.models.config import ModelConfig

MOST = 64  # ranks
ADDED_ONCE = ("output_bias", "down_bias")  # biases of sums over all ranks: zero but for rank 0


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` parts of a model."""

    rank: int = 0
    size: int = 1

    def config(self, whole: ModelConfig, name: str = "the model") -> ModelConfig:
        """The shape of this part; ConfigError where the model has none of this size."""
        size = self.size
        if not _divides(whole, size):
            sizes = ", ".join(str(n) for n in range(1, MOST + 1) if _divides(whole, n))
            raise ConfigError(
                f"--tensor-parallel-size {size}: {name} has {whole.heads} heads, {whole.kv_heads} key/value heads and"
                f" MLPs of {whole.mlp_size}, which cannot be divided so; it can by {sizes}"
            )
        heads, kv_heads = whole.heads // size, max(1, whole.kv_heads // size)
        own = replace(whole, heads=heads, kv_heads=kv_heads, mlp_size=whole.mlp_size // size)
        # one row of the vocabulary stands for what the other ranks never read
        return replace(own, vocab_size=1, tie_embeddings=True, draft_vocab_size=None) if self.rank else own

    def part(self, whole: int, own: int) -> slice:
        """Which `own` of the `whole` rows or columns of a tensor are this rank's; neighbours may share a key head."""
        first = own * (self.rank * (whole // own) // self.size)
        return slice(first, first + own)


WHOLE = Shard()


def _divides(whole: ModelConfig, size: int) -> bool:
    """Whether the ranks get equal shares; key heads may be fewer than ranks, and then several ranks have the same."""
    shared = whole.kv_heads % size == 0 or size % whole.kv_heads == 0
    return whole.heads % size == 0 and whole.mlp_size % size == 0 and shared
