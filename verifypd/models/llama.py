"""Llama 2 and 3, TinyLlama, CodeLlama, SmolLM2, Mistral: the block every other family builds on."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.kv.pool import LayerCache
from verifypd.models.base import Model
from verifypd.models.layers import DecoderLayer


class Llama(Model):
    """Mistral differs by its window alone, which the layer carries."""

    norms: ClassVar[dict[str, str]] = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    compiled = True

    def layer(
        self,
        layer: DecoderLayer,
        x: Tensor,
        residual: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        prepared: Any,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """See Model.layer."""
        norm, eps, unit = self.kernels.add_rms_norm, self._eps, self._unit
        x = self.attend(layer, x, layout, attention, prepared, cache)
        x, residual = norm(x, residual, layer.mlp_norm, eps, unit)
        return norm(self.mlp(layer, x), residual, layer.next_norm, eps, unit)

    def attend(
        self,
        layer: DecoderLayer,
        x: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        prepared: Any,
        cache: LayerCache,
    ) -> Tensor:
        """Attention of a layer with its projections, [N, H] -> [N, H]."""
        kernels, config = self.kernels, self.config
        rows = x.shape[0]
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias)
        q, k, v = qkv.view(rows, -1, config.head_dim).split_with_sizes(self._split, 1)  # a third of the cost of split
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, self._eps, self._unit)
            k = kernels.rms_norm(k, layer.k_norm, self._eps, self._unit)
        rotary = (layer.cos, layer.sin) if attention.rotates else None
        if rotary is None:
            kernels.rotate_(q, k, layout.positions, layer.cos, layer.sin)
        mixed = attention.attend(
            q,
            k,
            v,
            cache,
            layout,
            prepared,
            scale=config.scale,
            window=layer.window,
            softcap=config.attention_softcap,
            rotary=rotary,
        )
        return self.reduced(kernels.linear(mixed.reshape(rows, -1), layer.output, layer.output_bias))

    def mlp(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """Gated MLP, [N, H] -> [N, H]."""
        kernels = self.kernels
        gate_up = kernels.linear(x, layer.gate_up, layer.gate_up_bias)
        return self.reduced(kernels.linear(kernels.gated(gate_up, self.config.activation), layer.down, layer.down_bias))
