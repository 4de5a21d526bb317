"""The draft head with gradients: the same arithmetic as the engine's, over whole texts and several draft positions.

Row p reads token p and what the verifier made of position p − 1 (a *feature*), and predicts token p + 1. Where the
verifier has not been, the head's own output of the row before stands in for the feature. `unroll` trains both: at depth
d a row sees true features up to d − 1 rows back and the head's own after that, exactly as when d tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifypd.models.config import Rope
from verifypd.models.layers import rope_tables

INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head; hidden size and feature width are the verifier's."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feature_layers: tuple[int, ...]  # verifier layers whose residual stream is read; the last hidden state always is
    vocab: int
    window: int
    norm_eps: float
    softcap: float | None = None  # of the logits
    rope_theta: float = 10_000.0


class Norm(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size]."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def linear(columns: int, rows: int, std: float = INIT_STD) -> nn.Linear:
    """A matrix as training begins with it."""
    made = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(made.weight, std=std)
    return made


class Attention(nn.Module):
    """Projections of one layer. What is attended to lies with `HeadLayer`."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = linear(shape.hidden, q)
        self.k_proj = linear(shape.hidden, kv)
        self.v_proj = linear(shape.hidden, kv)
        self.o_proj = linear(q, shape.hidden, INIT_STD / (2 * shape.layers) ** 0.5)


class MLP(nn.Module):
    """Gated MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.mlp)
        self.up_proj = linear(shape.hidden, shape.mlp)
        self.down_proj = linear(shape.mlp, shape.hidden, INIT_STD / (2 * shape.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden]."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


@dataclass(slots=True)
class Seen:
    """Keys and values of one layer, one entry a depth so far: each [B, heads, T, D]."""

    keys: list[Tensor]
    values: list[Tensor]


class HeadLayer(nn.Module):
    """One decoder layer of the Llama kind."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        """x [B, T, hidden]; adds its keys and values to `seen` as one more depth."""
        x = x + self.self_attn.o_proj(self._attend(self.input_layernorm(x), cos, sin, seen))
        return x + self.mlp(self.post_attention_layernorm(x))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        sequences, length, _ = x.shape
        shape, parts = self.shape, self.self_attn
        q, k, v = (
            each.view(sequences, length, -1, shape.head_dim).transpose(1, 2)
            for each in (parts.q_proj(x), parts.k_proj(x), parts.v_proj(x))
        )
        group = shape.heads // shape.kv_heads
        k = _rotated(k, cos, sin).repeat_interleave(group, 1)
        seen.keys.append(k)
        seen.values.append(v.repeat_interleave(group, 1))
        mixed = depth_attention(_rotated(q, cos, sin), seen, shape.head_dim**-0.5, shape.window)
        return mixed.transpose(1, 2).reshape(sequences, length, -1)


def depth_attention(q: Tensor, seen: Seen, scale: float, window: int) -> Tensor:
    """Attention of the rows of depth d = len(seen.keys): [B, heads, T, D].

    Row p sees rows of depth 1 up to p − d + 1, then one row of each depth i = 2..d, at p − d + i: the draft so far.
    """
    depth, length = len(seen.keys), q.shape[2]
    if depth == 1 and length <= window:
        return F.scaled_dot_product_attention(q, seen.keys[0], seen.values[0], is_causal=True, scale=scale)
    with torch.autocast(q.device.type, enabled=False):
        at = torch.arange(length, device=q.device)
        distance = at[:, None] - at
        hidden = (distance < depth - 1) | (distance >= window)
        scores = (q * scale) @ seen.keys[0].transpose(-1, -2)
        scores = scores.masked_fill(hidden, -torch.inf)
        own = [(q * scale * later(seen.keys[i], depth - 1 - i)).sum(-1, keepdim=True) for i in range(1, depth)]
        spare = [scores.new_full((*q.shape[:3], -(depth - 1) % 8), -torch.inf)]  # rows stay aligned
        weights = torch.cat([scores, *own, *spare], -1).softmax(-1)
        mixed = weights[..., :length] @ seen.values[0]
        for i in range(1, depth):
            mixed = mixed + weights[..., length + i - 1 : length + i] * later(seen.values[i], depth - 1 - i)
        return mixed


def later(x: Tensor, rows: int) -> Tensor:
    """[..., T, D] moved `rows` rows down; zeros come in."""
    return x if not rows else F.pad(x, (0, 0, rows, 0))[..., : x.shape[-2], :]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half rotation of [B, heads, T, D] by cos and sin [T, D / 2]."""
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class Head(nn.Module):
    """All weights of a draft head, under the names its checkpoint has. The output matrix is the verifier's own rows."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        streams = len(shape.feature_layers) + 1
        self.feature_norms = nn.ModuleList(Norm(shape.hidden, shape.norm_eps) for _ in range(streams))
        self.features = linear(streams * shape.hidden, shape.hidden)
        self.embed_norm = Norm(shape.hidden, shape.norm_eps)
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.fc = linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList(HeadLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self._rope: tuple[Tensor, Tensor] | None = None  # made once a length is known

    def project(self, captured: tuple[Tensor, ...], hidden: Tensor) -> Tensor:
        """Features [..., hidden] from the verifier's residual streams and its last hidden state."""
        streams = [norm(x) for norm, x in zip(self.feature_norms, (*captured, hidden), strict=True)]
        projected: Tensor = self.features(torch.cat(streams, -1))
        return projected

    def unroll(self, embedded: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """Residual streams [B, T, hidden] of depth 1, 2, …; embedded, features [B, T, hidden] by position."""
        shape, length = self.shape, embedded.shape[1]
        if self._rope is None or len(self._rope[0]) < length or self._rope[0].device != embedded.device:
            self._rope = rope_tables(Rope(shape.rope_theta), shape.head_dim, max(length, shape.window), embedded.device)
        cos, sin = (table[:length] for table in self._rope)
        seen = [Seen([], []) for _ in range(shape.layers)]
        token = self.embed_norm(embedded)
        stream = features
        for _ in range(depth):
            x = self.fc(torch.cat([token, self.hidden_norm(later(stream, 1))], -1))
            for layer, past in zip(self.layers, seen, strict=True):
                x = layer(x, cos, sin, past)
            stream = x
            yield stream

    def logits(self, stream: Tensor, rows: Tensor) -> Tensor:
        """Logits [..., vocab] in float32; rows [vocab, hidden]: the verifier's, at the ids it may propose."""
        logits = F.linear(self.norm(stream).to(rows.dtype), rows).float()
        cap = self.shape.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def shape_for(
    config: Any, layers: int, mlp: int | None, features: tuple[int, ...] | None, vocab: int, window: int
) -> HeadShape:
    """A head for a verifier of this ModelConfig: its own widths, and by default features from two layers in between."""
    if features is None:
        features = tuple(sorted({config.layers // 4, (5 * config.layers) // 8} - {config.layers - 1}))
    return HeadShape(
        hidden=config.hidden_size,
        mlp=mlp or config.mlp_size,
        layers=layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        feature_layers=features,
        vocab=vocab,
        window=window,
        norm_eps=config.norm_eps,
        softcap=config.logit_softcap,
    )
