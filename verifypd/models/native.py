"""The layers of a model in one call of C. Knows weights and a pass's layout; what it computes is the families' `layer`.

Called from Python, each of the eight operations of a layer costs about 20 us beside its work, for the weights that
stream by leave it cold caches: 5 of 27 ms for one row of SmolLM2-135M in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int64, c_ssize_t, c_void_p

import torch
from torch import Tensor

from verifypd.attention.base import PassLayout
from verifypd.attention.native import TYPES as CACHE_TYPES
from verifypd.kernels import build
from verifypd.kernels.native import TYPES, NativeKernels, operand
from verifypd.kernels.weights import Weight
from verifypd.kv.pool import KVCache
from verifypd.models.config import ModelConfig
from verifypd.models.layers import DecoderLayer


class Vector(ctypes.Structure):
    """A norm's weight or a bias."""

    _fields_ = (("w", c_void_p), ("type", c_int64))


class Matrix(ctypes.Structure):
    """The weight of a product."""

    _fields_ = (
        ("w", c_void_p), ("scale", c_void_p), ("out", c_ssize_t), ("K", c_ssize_t), ("type", c_int64),
        ("bias", Vector),
    )  # fmt: skip


MATRICES = ("qkv", "output", "gate_up", "down")
NORMS = ("q_norm", "k_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm", "next_norm")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in MATRICES), *((name, Vector) for name in NORMS),
        ("cos", c_void_p), ("sin", c_void_p), ("window", c_ssize_t),
    )  # fmt: skip


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_ssize_t) for name in ("H", "I", "Hq", "Hk", "D", "half")), ("gelu", c_int64),
        *((name, c_float) for name in ("eps", "offset", "scale", "softcap")), ("first_norm", Vector),
    )  # fmt: skip


class NativeLayers:
    """Layers as C reads them. Their tensors must stay where they are: the structs hold their addresses."""

    def __init__(self, config: ModelConfig, layers: Sequence[DecoderLayer], kernels: NativeKernels) -> None:
        loaded = build.library()
        assert loaded is not None  # the kernels come from it
        self._run = loaded.vpd_layers
        self._kernels = kernels
        self._layers = tuple(layers)
        self._matrix_types = {values_of(getattr(layer, name)).dtype for layer in layers for name in MATRICES}
        self._structs = (_Layer * len(layers))(*[_layer(layer) for layer in layers])
        self._shape = _Shape(
            config.hidden_size, config.mlp_size, config.heads, config.kv_heads, config.head_dim,
            layers[0].cos.shape[1], config.activation == "gelu_tanh", config.norm_eps,
            1.0 if config.unit_offset else 0.0, config.scale, config.attention_softcap or 0.0,
            vector(layers[0].input_norm),
        )  # fmt: skip
        self._scratch = loaded.vpd_scratch(byref(self._shape))  # floats of a row

    @property
    def described(self) -> tuple[ctypes.Array[_Layer], _Shape, int]:
        """The layers' structs, their shape, and how many they are."""
        return self._structs, self._shape, len(self._layers)

    def takes(self, rows: int) -> bool:
        """Whether the kernels would compute all of a pass of so many rows in C."""
        return not any(self._kernels.leaves(rows, dtype) for dtype in self._matrix_types)

    def run(
        self,
        residual: Tensor,
        layout: PassLayout,
        prepared: tuple[int | None, ...],
        cache: KVCache,
        capture: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """residual [N, H] float32 -> normed behind the last layer, the stream there, and those behind the layers of
        `capture`.

        prepared: what NativeAttention.prepare(layout) gave.
        """
        residual, data = residual.contiguous(), cache.data
        rows, width = residual.shape
        behind = sorted(index for index in capture if index >= 0)
        x, stream, *captured = torch.empty(2 + len(behind), rows, width).unbind(0)
        scratch = torch.empty(rows * self._scratch)
        places = (c_int64 * len(self._layers))()
        for index, each in zip(behind, captured, strict=True):
            places[index] = each.data_ptr()
        size, scales = data.element_size(), None if cache.scales is None else cache.scales.data_ptr()
        failed = self._run(
            self._structs, len(self._layers), byref(self._shape), residual.data_ptr(),
            stream.data_ptr(), x.data_ptr(), places, scratch.data_ptr(), layout.positions.data_ptr(),
            data.data_ptr(), data.stride(0) * size, data.stride(1) * size, CACHE_TYPES[data.dtype], scales, *prepared,
            rows, layout.spans, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the working space of a pass")
        return x, stream, captured


def values_of(weight: Weight) -> Tensor:
    """The tensor of its entries."""
    return weight if isinstance(weight, Tensor) else weight.values


def vector(entries: Tensor | None) -> Vector:
    """A vector as C takes it."""
    return Vector() if entries is None else Vector(entries.data_ptr(), TYPES[entries.dtype])


def matrix(weight: Weight, bias: Tensor | None) -> Matrix:
    """A matrix as C takes it."""
    at, scale, kind = operand(weight)
    return Matrix(at, scale, *weight.shape, kind, vector(bias))


def _layer(layer: DecoderLayer) -> _Layer:
    return _Layer(
        *(matrix(getattr(layer, name), getattr(layer, f"{name}_bias")) for name in MATRICES),
        *(vector(getattr(layer, name)) for name in NORMS),
        layer.cos.data_ptr(), layer.sin.data_ptr(), layer.window or 0,
    )  # fmt: skip
