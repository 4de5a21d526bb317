"""Llama 2 and 3, TinyLlama, CodeLlama, SmolLM2, Mistral: the block every other family builds on."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.kernels.base import Rows
from verifypd.kernels.weights import Weight
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
        x: Rows,
        residual: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        prepared: Any,
        cache: LayerCache,
    ) -> tuple[Rows, Tensor]:
        """See Model.layer."""
        mixed = self.mix(layer, x, layout, attention, prepared, cache)
        x, residual = self._added(mixed, layer.output, layer.output_bias, residual, layer.mlp_norm)
        acted = self.kernels.linear_gated(x, layer.gate_up, layer.gate_up_bias, self.config.activation)
        return self._added(acted, layer.down, layer.down_bias, residual, layer.next_norm)

    def _added(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, norm: Tensor
    ) -> tuple[Rows, Tensor]:
        """A product onto the residual stream: the stream, and before it, normed."""
        kernels, eps, unit = self.kernels, self._eps, self._unit
        if self.reduce is None:
            return kernels.linear_add_norm(x, weight, bias, residual, norm, eps, unit)
        return kernels.add_rms_norm(self.reduce(kernels.linear(x, weight, bias)), residual, norm, eps, unit)

    def mix(
        self,
        layer: DecoderLayer,
        x: Rows,
        layout: PassLayout,
        attention: AttentionBackend,
        prepared: Any,
        cache: LayerCache,
    ) -> Tensor:
        """Attention of a layer before its output projection, [N, H] -> [N, heads * D]."""
        kernels, config = self.kernels, self.config
        rows = x.shape[0]
        if attention.written is not None and layer.q_norm is None:
            ready = kernels.linear_qkv(
                x, layer.qkv, layer.qkv_bias, layer.cos, layer.sin, layout.positions, cache.k, cache.v,
                layout.write_index, cache.scales,
            )  # fmt: skip
            if ready is not None:
                return attention.written.attend_written(
                    ready, cache, layout, prepared, scale=config.scale, window=layer.window,
                    softcap=config.attention_softcap,
                ).reshape(rows, -1)  # fmt: skip
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
        return mixed.reshape(rows, -1)
