"""A verifier over whole batches of equal length: for writing text and for reading features. Knows models and tensors.

The engine's paged cache serves many requests of any length; here all rows move in step, so a cache is one tensor and
attention one call. Any family the loader knows runs through it: the model's own layers compute everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.attention.base import Rotary
from verifypd.kernels.torch import TorchKernels
from verifypd.kv.pool import LayerCache
from verifypd.models.base import Model


@dataclass(frozen=True, slots=True)
class Places:
    """What a layer reads of a pass layout here: where each row stands."""

    positions: Tensor  # [N] int64


class BatchKernels(TorchKernels):
    """Torch kernels for large batches on a GPU: fused norms, and one kernel for the rotation where it compiles."""

    name = "batch"

    def __init__(self, device: torch.device) -> None:
        self._rotate = _compiled_rotation(device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """See Kernels.rms_norm."""
        scale = 1.0 + weight.float() if unit_offset else weight
        return F.rms_norm(x, x.shape[-1:], scale.to(x.dtype), eps)

    def rotate_(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See Kernels.rotate_."""
        if self._rotate is None:
            super().rotate_(q, k, positions, cos, sin)
            return
        rotated_q, rotated_k = self._rotate(q, k, positions, cos, sin)
        q.copy_(rotated_q)
        k.copy_(rotated_k)


def rotation(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [N, heads, D] rotated, as new tensors."""
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    half = cos.shape[1]
    turned = []
    for x in (q, k):
        low, high = x[..., :half].float(), x[..., half:].float()
        turned.append(torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype))
    return turned[0], turned[1]


def _compiled_rotation(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`rotation` as one kernel; None on a CPU, or where the compiler fails."""
    if device.type != "cuda":
        return None
    try:
        compiled = torch.compile(rotation, dynamic=True)
        x = torch.ones(8, 6, 16, device=device, dtype=torch.bfloat16)
        table = torch.ones(8, 8, device=device)
        with torch.inference_mode():
            compiled(x[:, :4], x[:, 4:], torch.arange(8, device=device), table, table)
    except Exception:  # noqa: BLE001  # whatever a compiler may raise: plain kernels do the same
        return None
    return compiled


class DenseAttention:
    """Causal attention within B sequences of T rows each. Rows before `first` [B] are padding."""

    name = "dense"
    rotates = False
    written = None

    def __init__(self, sequences: int, length: int, first: Tensor | None = None) -> None:
        self.sequences = sequences
        self.length = length
        self.first = first

    def prepare(self, layout: Any) -> None:
        """Nothing is shared between layers."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache | None,
        layout: Any,
        prepared: Any,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See AttentionBackend.attend; a cache, where given, gets the keys and values in its first T columns."""
        shape = (self.sequences, self.length)
        q, k, v = (x.view(*shape, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
        if cache is not None:
            cache.k[:, :, : self.length] = k
            cache.v[:, :, : self.length] = v
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if window is not None and window >= self.length:
            window = None
        if self.first is None and window is None and softcap is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            bias = bias_of(self._mask(q.device, window), q.dtype)
            mixed = biased_attention(q, k, v, bias, scale, softcap)
        return mixed.transpose(1, 2).reshape(len(layout.positions), -1, q.shape[-1])

    def _mask(self, device: torch.device, window: int | None) -> Tensor:
        at = torch.arange(self.length, device=device)
        seen = at[:, None] >= at
        if window is not None:
            seen &= at[:, None] - at < window
        if self.first is None:
            return seen
        own = torch.eye(self.length, dtype=torch.bool, device=device)  # padding rows see themselves: no empty row
        return (seen & (at >= self.first[:, None, None, None])) | own


class StepAttention:
    """Attention of one new token per sequence over a cache that all sequences fill in step."""

    name = "step"
    rotates = False
    written = None

    def __init__(self, column: Tensor, width: int, first: Tensor) -> None:
        self.column = column  # [1] int64, where the new tokens stand
        self.width = width  # columns looked at; host int, so that shapes are known
        self.first = first  # [B], columns before it are padding
        self._seen: dict[int | None, Tensor] = {}  # window -> mask, shared by the layers of one pass

    def prepare(self, layout: Any) -> None:
        """Nothing yet: masks are made when the first layer asks."""

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a sequence sees a column, else -inf: [B, 1, 1, width]."""
        if window is not None and window >= self.width:
            window = None
        if window not in self._seen:
            at = torch.arange(self.width, device=self.column.device)
            seen = (at >= self.first[:, None]) & (at <= self.column)
            if window is not None:
                seen &= at > self.column - window
            self._seen[window] = bias_of(seen[:, None, None], dtype)
        return self._seen[window]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerCache,
        layout: Any,
        prepared: Any,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See AttentionBackend.attend. Heads that share keys are rows of one query: keys are never repeated."""
        cache.k.index_copy_(2, self.column, k.unsqueeze(2))
        cache.v.index_copy_(2, self.column, v.unsqueeze(2))
        queries = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])  # [B, kv heads, group, D]
        keys, values = cache.k[:, :, : self.width], cache.v[:, :, : self.width]
        bias = self._bias(window, q.dtype)
        return biased_attention(queries, keys, values, bias, scale, softcap).reshape(q.shape)


def bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `seen`, else -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q [B, H, T, D] over k and v [B, H, S, D]; bias is added to the scores [B, H, T, S]."""
    if softcap is None:
        with _kernels(q.device):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    return (scores + bias).softmax(-1) @ v


def _kernels(device: torch.device) -> Any:
    """The kernel that takes a mask and any query length, on a GPU."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class StaticCache:
    """Keys and values of B sequences, a column a token; each layer's are [B, kv heads, columns, D]."""

    def __init__(self, model: Model, sequences: int, columns: int) -> None:
        config = model.config
        shape = (sequences, config.kv_heads, columns, config.head_dim)
        options: dict[str, Any] = {"dtype": model.activation_dtype, "device": model.device}
        self._layers = [
            LayerCache(torch.zeros(shape, **options), torch.zeros(shape, **options)) for _ in range(config.layers)
        ]

    def layer(self, index: int) -> LayerCache:
        """See KVCache.layer."""
        return self._layers[index]

    def rows(self, part: slice) -> StaticCache:
        """The same cache, some sequences of it."""
        view = object.__new__(StaticCache)
        view._layers = [LayerCache(cache.k[part], cache.v[part]) for cache in self._layers]
        return view


class NoCache:
    """For passes that keep nothing."""

    def layer(self, index: int) -> None:
        """None: there is nothing to write to."""


def read_features(model: Model, ids: Tensor, capture: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Hidden states [B, T, H] after the last norm, and the residual streams [B, T, H] after the layers in `capture`.

    ids [B, T], padded at the end: nothing before the padding sees it.
    """
    sequences, length = ids.shape
    places = Places(torch.arange(length, device=ids.device).repeat(sequences))
    hidden, captured = model.forward_capturing(
        ids.reshape(-1),
        cast(Any, places),
        cast(Any, DenseAttention(sequences, length)),
        cast(Any, NoCache()),
        capture,
    )
    shape = (sequences, length, -1)
    return hidden.view(shape), tuple(each.view(shape) for each in captured)
