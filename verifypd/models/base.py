"""A decoder-only model: embedding, a loop over layers, the head. Knows kernels and attention; nothing of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout, Reader
from verifypd.attention.native import NativeAttention
from verifypd.kernels.base import Kernels, Rows
from verifypd.kernels.native import NativeKernels
from verifypd.kernels.weights import Weight
from verifypd.kv.pool import KVCache, LayerCache
from verifypd.models.config import ModelConfig
from verifypd.models.layers import DecoderLayer, WeightSpec, layer_specs, rope_tables
from verifypd.models.native import NativeLayers


class Model:
    """Weights in place and ready to run; a family says what a layer computes. Callers hold torch.inference_mode()."""

    norms: ClassVar[dict[str, str]]  # our name of a norm over the hidden size -> its name in a checkpoint layer
    compiled: ClassVar[bool] = False  # whether what this very class computes of a layer is what models/native.py does

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """weights: by the targets of `specs`. dtype: of the weights. max_model_len: positions of the rotary tables.

        reduce: where this is a shard, adds up what all ranks have of a sum [N, H]; it may do so in place.
        """
        self.config = config
        self.reduce = reduce
        self.kernels = kernels
        self.dtype = dtype
        self.activation_dtype = kernels.activation_dtype(dtype)
        self.max_model_len = max_model_len
        self.embedding = weights["embedding"]
        self.head = self.embedding if config.tie_embeddings else weights["head"]
        self.device = self.embedding.device
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        scale = config.embed_scale  # rounded as the checkpoint's own dtype rounds it
        self.embed_scale = None if scale is None else float(torch.tensor(scale, dtype=dtype))
        self.narrow = False  # ids may lie past the embedding: a draft whose verifier has a padded vocabulary
        self._split = [config.heads, config.kv_heads, config.kv_heads]
        self._eps, self._unit = config.norm_eps, config.unit_offset
        self.layers = self._build_layers(weights)
        self.native: NativeLayers | None = None  # all layers in one call
        if isinstance(kernels, NativeKernels) and reduce is None and self._all_compiled():
            self.native = NativeLayers(config, self.layers, kernels)

    @classmethod
    def _all_compiled(cls) -> bool:
        """A class that computes some of a layer in its own way must say that C does so too."""
        owners = [next((c for c in cls.__mro__ if part in vars(c)), Model) for part in ("layer", "mix")]
        return all(vars(owner).get("compiled") for owner in owners)

    @classmethod
    def specs(cls, config: ModelConfig) -> dict[str, WeightSpec]:
        """Every tensor of the model by target; names are those of a checkpoint without the leading `model.`"""
        hidden, vocab = config.hidden_size, config.vocab_size
        specs = {"embedding": WeightSpec("embedding", (("embed_tokens.weight", vocab),), hidden)}
        per_layer = layer_specs(config, cls.norms)
        for index in range(config.layers):
            for spec in per_layer:
                target = f"layers.{index}.{spec.target}"
                pieces = tuple((f"layers.{index}.{name}", rows) for name, rows in spec.pieces)
                specs[target] = WeightSpec(target, pieces, spec.columns)
        specs["norm"] = WeightSpec("norm", (("norm.weight", hidden),))
        if not config.tie_embeddings:
            rows = config.draft_vocab_size or vocab
            specs["head"] = WeightSpec("head", (("lm_head.weight", rows),), hidden)
        return specs

    def _build_layers(self, weights: Mapping[str, Weight]) -> list[DecoderLayer]:
        config = self.config
        ropes = {rope for rope in (config.rope, config.local_rope) if rope is not None}
        tables = {rope: rope_tables(rope, config.head_dim, self.max_model_len, self.device) for rope in ropes}
        targets = [spec.target for spec in layer_specs(config, self.norms)]
        layers = []
        for index in range(config.layers):
            own: dict[str, Any] = {target: weights[f"layers.{index}.{target}"] for target in targets}
            own["next_norm"] = weights.get(f"layers.{index + 1}.input_norm", weights["norm"])
            own["cos"], own["sin"] = tables[config.layer_rope(index)]
            layers.append(DecoderLayer(window=config.windows[index], **own))
        return layers

    def forward(
        self,
        ids: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        cache: KVCache,
        prepared: Any = None,
        reader: Reader | None = None,
    ) -> Tensor:
        """ids [N] -> hidden [N, H] after the final norm; writes keys and values of the rows into the cache.

        prepared: what attention.prepare(layout) gave, where it must not run here (inside the capture of a graph).
        reader: gets what it reads of the pass.
        """
        if prepared is None:
            prepared = attention.prepare(layout)
        capture = reader.layers if reader is not None else ()
        rows, residual = self._begin(ids)
        return self.through_layers(residual, layout, attention, prepared, cache, capture, reader, rows)[0]

    def forward_capturing(
        self,
        ids: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        cache: KVCache,
        capture: tuple[int, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `forward`, with the residual stream [N, H] after each layer in `capture`, in the order of layers; after
        layer -1: the embedding."""
        prepared = attention.prepare(layout)
        x, _, captured = self.through_layers(self.embed(ids), layout, attention, prepared, cache, capture)
        return x, captured

    def through_layers(
        self,
        residual: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        prepared: Any,
        cache: KVCache,
        capture: tuple[int, ...] = (),
        reader: Reader | None = None,
        rows: Rows | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """[N, H] -> normed behind the last layer, the residual stream there, and the streams behind `capture`.

        reader: gets the latter and, where it reads the output, what is normed. rows: the input normed for the first
        layer, if it is already.
        """
        captured = [residual] if -1 in capture else []
        if self.native is not None and isinstance(attention, NativeAttention) and self.native.takes(len(residual)):
            x, residual, behind = self.native.run(residual, layout, prepared, cache, capture)
            captured += behind
        else:
            if rows is None:
                rows = self.kernels.rms_norm(residual, self.layers[0].input_norm, self._eps, self._unit)
            for index, layer in enumerate(self.layers):
                rows, residual = self.layer(layer, rows, residual, layout, attention, prepared, cache.layer(index))
                if index in capture:
                    captured.append(residual)
            x = self.kernels.whole(rows)
        if reader is not None:
            reader.keep((*captured, x) if reader.output else captured, layout)
        return x, residual, tuple(captured)

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
        """x: normed input [N, H]. Returns the input of the next layer, normed likewise, and the residual stream."""
        raise NotImplementedError

    def reduced(self, part: Tensor) -> Tensor:
        """What a layer adds to the residual stream [N, H], from what the heads or MLP columns held here add to it."""
        return part if self.reduce is None else self.reduce(part)

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, H], in the activation dtype."""
        rows = self.kernels.embed(self.known(ids), self.embedding).to(self.activation_dtype)
        return rows if self.embed_scale is None else rows * self.embed_scale

    def known(self, ids: Tensor) -> Tensor:
        """Ids [N] as the embedding takes them: those that a narrow model does not know are its last one."""
        return ids.clamp(max=self.config.vocab_size - 1) if self.narrow else ids

    def _begin(self, ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """What enters the first layer, normed unless all layers run in one call, and the residual stream."""
        if self.native is not None:
            return None, self.embed(ids)
        return self.kernels.embed_norm(
            self.known(ids), self.embedding, self.embed_scale, self.layers[0].input_norm, self._eps, self._unit,
            self.activation_dtype,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, rows of the head] float32, soft-capped where the family does so."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """The same in the dtype they are computed in: who reads each of them once can widen it then."""
        logits = self.kernels.linear(hidden, self.head)
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap
