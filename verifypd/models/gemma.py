"""Gemma 1, 2 and 3 (text): norms scale by 1 + weight, embeddings by sqrt(hidden). Knows nothing of images."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.kernels.base import Rows
from verifypd.kv.pool import LayerCache
from verifypd.models.layers import DecoderLayer
from verifypd.models.llama import Llama


class Gemma(Llama):
    """Llama's block with a tanh GELU."""


class Gemma2(Llama):
    """Norms before and after attention and MLP; soft-capped scores and logits; every other layer has a window."""

    norms: ClassVar[dict[str, str]] = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
    compiled = True

    def layer(
        self,
        layer: DecoderLayer,
        x: Rows,
        residual: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        prepared: Any,
        cache: LayerCache,
    ) -> tuple[Rows, Tensor]:
        """See Model.layer."""
        kernels, eps, unit = self.kernels, self._eps, self._unit
        assert layer.post_attention_norm is not None
        assert layer.post_mlp_norm is not None
        mixed = self.mix(layer, x, layout, attention, prepared, cache)
        added = self.reduced(kernels.linear(mixed, layer.output, layer.output_bias))
        added = kernels.rms_norm(added, layer.post_attention_norm, eps, unit)
        normed, residual = kernels.add_rms_norm(added, residual, layer.mlp_norm, eps, unit)
        acted = kernels.linear_gated(normed, layer.gate_up, layer.gate_up_bias, self.config.activation)
        added = self.reduced(kernels.linear(acted, layer.down, layer.down_bias))
        added = kernels.rms_norm(added, layer.post_mlp_norm, eps, unit)
        return kernels.add_rms_norm(added, residual, layer.next_norm, eps, unit)


class Gemma3(Gemma2):
    """q and k normed per head; five windowed layers to each full one, with a rotary base of their own."""
