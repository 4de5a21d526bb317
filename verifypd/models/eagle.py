"""EAGLE heads as they are published: EAGLE-1 and 2, and EAGLE-3 with the flags of 3.1. Knows nothing of their files.

Their first row is position 1, with the feature of position 0. Embeddings are read as they are stored, without the scale
that Gemma puts on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.kernels.base import Kernels, Rows
from verifypd.kernels.weights import Quantization, Weight
from verifypd.kv.pool import KVCache
from verifypd.models.base import Model
from verifypd.models.config import ModelConfig
from verifypd.models.eagle_config import EagleFields
from verifypd.models.head import DraftHead, rows_of, vector
from verifypd.models.layers import WeightSpec


class EagleBase(DraftHead):
    """What all EAGLE heads have in common. Its layers run one operation at a time: C knows no layer with two inputs."""

    from_start = False

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        kernels: Kernels,
        *,
        verifier: Model,
        vocab_map: Tensor | None,
        dtype: torch.dtype,
        max_model_len: int,
        quantization: Quantization | None = None,
    ) -> None:
        """weights: what the file holds; embedding and output rows are the verifier's where it holds none."""
        held = dict(weights)
        held.setdefault("embedding", verifier.embedding)
        if "head" not in held:
            held["head"] = rows_of(verifier.head, vocab_map, kernels, quantization)
        own = [weight for weight in held.values() if weight is not verifier.embedding and weight is not verifier.head]
        super().__init__(
            config, self._completed(held, config), kernels, verifier=verifier, vocab_map=vocab_map, dtype=dtype,
            max_model_len=max_model_len,
        )  # fmt: skip
        self.weight_bytes = sum(weight.nbytes for weight in own)
        self._fc = held["fc"]

    @classmethod
    def _all_compiled(cls) -> bool:
        return False

    @staticmethod
    def _completed(weights: dict[str, Weight], config: ModelConfig) -> dict[str, Weight]:
        return weights

    @classmethod
    def specs(cls, config: ModelConfig) -> dict[str, WeightSpec]:
        """What the head's own file holds."""
        eagle = fields_of(config)
        absent = {name for name, own in (("embedding", eagle.own_embedding), ("head", eagle.own_head)) if not own}
        return {name: spec for name, spec in super().specs(config).items() if name not in absent}


class EagleHead(EagleBase):
    """EAGLE-1 and 2: a matrix over token and last hidden state, then a layer without an input norm, and no norm."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], kernels: Kernels, **options: Any) -> None:
        super().__init__(config, weights, kernels, **options)
        self._fc_bias = vector(weights["fc_bias"]) if "fc_bias" in weights else None

    @staticmethod
    def _completed(weights: dict[str, Weight], config: ModelConfig) -> dict[str, Weight]:
        """With the norms that this layer has not: what they give is read by nobody."""
        one = torch.ones_like(vector(weights["layers.0.mlp_norm"]))
        return {**weights, "layers.0.input_norm": one, "norm": one}

    @classmethod
    def specs(cls, config: ModelConfig) -> dict[str, WeightSpec]:
        """See EagleBase.specs."""
        hidden = config.hidden_size
        specs = super().specs(config)
        del specs["layers.0.input_norm"], specs["norm"]
        specs["fc"] = WeightSpec("fc", (("fc.weight", hidden),), 2 * hidden)
        if fields_of(config).fc_bias:
            specs["fc_bias"] = WeightSpec("fc_bias", (("fc.bias", hidden),))
        return specs

    def project(self, streams: Sequence[Tensor]) -> Tensor:
        """See DraftHead.project: the last hidden state itself."""
        [output] = streams
        return output

    def read(
        self,
        ids: Tensor,
        features: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        cache: KVCache,
        prepared: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead.read; the output of the layer is both."""
        if prepared is None:
            prepared = attention.prepare(layout)
        [layer] = self.layers
        x = self.kernels.linear(self.beside(ids, features)[0], self._fc, self._fc_bias)
        _, stream = self.layer(layer, x, x, layout, attention, prepared, cache.layer(0))
        return stream, stream


class Eagle3Head(EagleBase):
    """EAGLE-3: features from several states; the first layer attends with token and feature side by side."""

    reads_output = False

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], kernels: Kernels, **options: Any) -> None:
        super().__init__(config, weights, kernels, **options)
        self._eagle = fields_of(config)
        after = states_of(config)
        self.feature_layers = tuple(sorted(set(after)))
        self._order = [
            self.feature_layers.index(layer) for layer in after
        ]  # the streams as the columns of fc have them
        self._hidden_norm = vector(weights["hidden_norm"])
        self._input_norm = vector(weights["input_norm"]) if self._eagle.norm_before_fc else None
        count = len(after) if self._eagle.fc_norm else 0
        self._fc_norms = [vector(weights[f"fc_{i}_norm"]) for i in range(count)]

    @classmethod
    def specs(cls, config: ModelConfig) -> dict[str, WeightSpec]:
        """See EagleBase.specs."""
        eagle, hidden = fields_of(config), config.hidden_size
        width, count = eagle.target_hidden or hidden, len(states_of(config))
        specs = super().specs(config)
        qkv = specs["layers.0.qkv"]
        specs["layers.0.qkv"] = WeightSpec(qkv.target, qkv.pieces, 2 * hidden)
        specs["hidden_norm"] = WeightSpec("hidden_norm", (("layers.0.hidden_norm.weight", hidden),))
        specs["fc"] = WeightSpec("fc", (("fc.weight", hidden),), count * width)
        if eagle.norm_before_fc:
            specs["input_norm"] = WeightSpec("input_norm", (("input_norm.weight", count * width),))
        if eagle.fc_norm:
            for i in range(count):
                specs[f"fc_{i}_norm"] = WeightSpec(f"fc_{i}_norm", ((f"fc_norm.{i}.weight", width),))
        return specs

    @property
    def places(self) -> int:
        """States that a feature is made of."""
        return len(self._order)

    def project(self, streams: Sequence[Tensor]) -> Tensor:
        """See DraftHead.project."""
        return self.fuse([streams[place] for place in self._order])

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """Features from states in the order of `fc`: one matrix over all, normed where the head's flags say so."""
        norm, eps = self.kernels.rms_norm, self._eps
        parts = list(parts)
        if self._fc_norms:
            parts = [norm(x, weight, eps) for x, weight in zip(parts, self._fc_norms, strict=True)]
        together = torch.cat(parts, -1)
        if self._input_norm is not None:
            together = norm(together, self._input_norm, eps)
        return self.kernels.linear(together, self._fc)

    def read(
        self,
        ids: Tensor,
        features: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        cache: KVCache,
        prepared: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead.read; the residual stream is carried, or with `norm_output` what is normed."""
        if prepared is None:
            prepared = attention.prepare(layout)
        together, normed = self.beside(ids, features, (self.layers[0].input_norm, self._hidden_norm))
        rows: Rows = together
        residual = normed if self._eagle.norm_before_residual else features
        for index, layer in enumerate(self.layers):
            rows, residual = self.layer(layer, rows, residual, layout, attention, prepared, cache.layer(index))
        x = self.kernels.whole(rows)
        return x, x if self._eagle.norm_output else residual


def fields_of(config: ModelConfig) -> EagleFields:
    """What only an EAGLE config has."""
    assert config.eagle is not None
    return config.eagle


def states_of(config: ModelConfig) -> tuple[int, ...]:
    """Verifier layers after which the states are taken, −1 the embedding, in the order of fc's columns."""
    states = fields_of(config).states
    assert states is not None  # the loader knows how many layers the verifier has
    return tuple(k - 1 for k in states)
