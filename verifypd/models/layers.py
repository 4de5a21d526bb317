"""The weights of a decoder layer and their names in a checkpoint, and rotary tables. Knows no family and no file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verifypd.kernels.weights import Weight
from verifypd.models.config import ModelConfig, Rope

# Rows of a span may reach past the longest context by the draft length: their output is dropped, their lookup holds.
ROPE_OVERHANG = 128


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of ours, made of the rows of one or more checkpoint tensors in this order."""

    target: str  # attribute of DecoderLayer or Model
    pieces: tuple[tuple[str, int], ...]  # (checkpoint name, rows)
    columns: int | None = None  # None: a vector

    @property
    def rows(self) -> int:
        """Rows of all pieces together."""
        return sum(rows for _, rows in self.pieces)


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    """Weights of one layer. H hidden size, D head dimension, I MLP size."""

    input_norm: Tensor  # [H]
    qkv: Weight  # [(heads + 2 kv_heads) * D, H]
    output: Weight  # [H, heads * D]
    mlp_norm: Tensor  # [H], before the MLP
    gate_up: Weight  # [2 I, H]
    down: Weight  # [H, I]
    next_norm: Tensor  # [H], the norm that follows this layer: the next layer's input norm or the final one
    cos: Tensor  # [T, D / 2] float32
    sin: Tensor  # [T, D / 2] float32
    window: int | None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    post_attention_norm: Tensor | None = None  # [H], on what attention adds to the residual
    post_mlp_norm: Tensor | None = None  # [H], on what the MLP adds to the residual


def layer_specs(config: ModelConfig, norms: dict[str, str]) -> tuple[WeightSpec, ...]:
    """The tensors of one layer; `norms` gives the family's checkpoint names of its norms over H."""
    hidden, mlp = config.hidden_size, config.mlp_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    gate_up = (("mlp.gate_proj", mlp), ("mlp.up_proj", mlp))
    linears = (
        ("qkv", qkv, hidden, config.qkv_bias),
        ("output", (("self_attn.o_proj", hidden),), q, config.output_bias),
        ("gate_up", gate_up, hidden, config.mlp_bias),
        ("down", (("mlp.down_proj", hidden),), mlp, config.mlp_bias),
    )
    specs = [WeightSpec(target, ((f"{name}.weight", hidden),)) for target, name in norms.items()]
    for target, parts, columns, bias in linears:
        specs.append(WeightSpec(target, tuple((f"{name}.weight", rows) for name, rows in parts), columns))
        if bias:
            specs.append(WeightSpec(f"{target}_bias", tuple((f"{name}.bias", rows) for name, rows in parts)))
    if config.qk_norm:
        specs.append(WeightSpec("q_norm", (("self_attn.q_norm.weight", config.head_dim),)))
        specs.append(WeightSpec("k_norm", (("self_attn.k_norm.weight", config.head_dim),)))
    return tuple(specs)


def rope_tables(rope: Rope, head_dim: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [positions + ROPE_OVERHANG, head_dim / 2] float32."""
    frequencies = _stretched(rope, head_dim)
    angles = torch.arange(positions + ROPE_OVERHANG).float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos.to(device), sin.to(device)


def _stretched(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, radians a token."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = (rope.original_max / wavelength - low) / (high - low)
        blended = (1 - smooth) * plain / rope.factor + smooth * plain
        long = wavelength > rope.original_max / low
        short = wavelength < rope.original_max / high
        return torch.where(long, plain / rope.factor, torch.where(short, plain, blended))
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, powers)
    return plain  # "default", and "dynamic" within the context of pre-training


def _yarn(rope: Rope, head_dim: int, powers: Tensor) -> Tensor:
    def dimension(rotations: float) -> float:
        """Where a frequency turns `rotations` times over the original context."""
        return head_dim * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep
