"""A draft head: a layer or two that read the verifier's own states beside a token. Knows nothing of who drafts.

Row p reads token p and the *feature* of position p − 1, and predicts token p + 1. A feature is made from the verifier's
residual streams by `project`; where the verifier has not been, what the head's own row before carried stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from verifypd.attention.base import AttentionBackend, PassLayout
from verifypd.attention.native import NativeAttention
from verifypd.kernels.base import Kernels
from verifypd.kernels.native import NativeKernels
from verifypd.kernels.weights import QUANTIZED, Fp8Weight, Int8Panels, Int8Weight, PackedWeight, Quantization, Weight
from verifypd.kv.pool import KVCache
from verifypd.models.base import Model
from verifypd.models.config import ModelConfig
from verifypd.models.layers import WeightSpec
from verifypd.models.llama import Llama
from verifypd.models.native_head import NativeHead


class DraftHead(Llama):
    """Weights of a head in place, next to the verifier it drafts for. A format says what a feature and a row are."""

    reads_output: ClassVar[bool] = True  # the verifier's final normed hidden state is the last of the streams
    from_start: ClassVar[bool] = True  # there is a row of position 0, with a feature of zeros
    vocab_map: Tensor | None  # [V] int64, the verifier's id of each token the head may propose; None: V is all of them
    native_head: NativeHead | None = None  # all that the head computes, in calls of C

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
    ) -> None:
        """weights: by the targets of `specs`, with an embedding and a head, whoever owns them."""
        super().__init__(config, weights, kernels, dtype=dtype, max_model_len=max_model_len)
        self.verifier = verifier
        self.vocab_map = vocab_map
        self.feature_layers = config.feature_layers or ()  # after decoder layer i; −1 is the embedding; ascending

    @property
    def feature_width(self) -> int:
        """Numbers that are kept of each position: those of one feature."""
        return self.config.hidden_size

    @property
    def streams(self) -> int:
        """How many streams [N, hidden size of the verifier] a feature is made of."""
        return len(self.feature_layers) + self.reads_output

    @property
    def embeds(self) -> Model:
        """Whose embedding it reads tokens with."""
        return self

    def beside(
        self, ids: Tensor, features: Tensor, norms: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [N] embedded with the features [N, H] beside them, [N, 2 H], and those: each normed by its norm."""
        of = self.embeds
        return self.kernels.embed_beside(of.known(ids), of.embedding, of.embed_scale, features, norms, self._eps)

    def project(self, streams: Sequence[Tensor]) -> Tensor:
        """Features [N, feature_width] from the verifier's residual streams after `feature_layers`, each [N, its hidden
        size], and its last hidden state where `reads_output`."""
        raise NotImplementedError

    def read(
        self,
        ids: Tensor,
        features: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        cache: KVCache,
        prepared: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """ids [N] and the features [N, feature_width] of the positions before -> (normed, carried), each [N, H].

        `normed` is for `logits`; `carried` stands in for the feature of the row's own position. prepared: what
        attention.prepare(layout) gave, where it must not run here.
        """
        raise NotImplementedError


class DistilledHead(DraftHead):
    """A head that `verifypd distil` made. Embedding and output rows are the verifier's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        kernels: Kernels,
        *,
        verifier: Model,
        vocab_map: Tensor,
        dtype: torch.dtype,
        max_model_len: int,
        quantization: Quantization | None = None,
    ) -> None:
        """quantization: of its copy of the output rows, whatever the verifier's are in."""
        shared = {"embedding": verifier.embedding, "head": rows_of(verifier.head, vocab_map, kernels, quantization)}
        super().__init__(
            config, {**weights, **shared}, kernels, verifier=verifier, vocab_map=vocab_map, dtype=dtype,
            max_model_len=max_model_len,
        )  # fmt: skip
        self.weight_bytes = sum(weight.nbytes for weight in weights.values()) + self.head.nbytes
        self._feature_norms = [vector(weights[f"feature_{i}_norm"]) for i in range(self.streams)]
        self._features = weights["features"]
        self._embed_norm, self._hidden_norm = vector(weights["embed_norm"]), vector(weights["hidden_norm"])
        self._fc = weights["fc"]
        if self.native is not None and isinstance(kernels, NativeKernels) and not verifier.narrow:
            self.native_head = NativeHead(
                self.native, kernels, embedding=verifier.embedding, embed_scale=verifier.embed_scale,
                embed_norm=self._embed_norm, hidden_norm=self._hidden_norm, fc=self._fc, output=self.head,
                feature_norms=self._feature_norms, features=self._features, eps=self._eps,
            )  # fmt: skip

    @classmethod
    def specs(cls, config: ModelConfig) -> dict[str, WeightSpec]:
        """What the head's own file holds."""
        hidden, streams = config.hidden_size, len(config.feature_layers or ()) + 1
        specs = {name: spec for name, spec in super().specs(config).items() if name not in ("embedding", "head")}
        for i in range(streams):
            specs[f"feature_{i}_norm"] = WeightSpec(f"feature_{i}_norm", ((f"feature_norms.{i}.weight", hidden),))
        for name in ("embed_norm", "hidden_norm"):
            specs[name] = WeightSpec(name, ((f"{name}.weight", hidden),))
        specs["features"] = WeightSpec("features", (("features.weight", hidden),), streams * hidden)
        specs["fc"] = WeightSpec("fc", (("fc.weight", hidden),), 2 * hidden)
        return specs

    def project(self, streams: Sequence[Tensor]) -> Tensor:
        """See DraftHead.project: each stream normed, then one matrix over all."""
        if self.native_head is not None and self.native_head.takes(len(streams[0])):
            return self.native_head.project(streams)
        norm, eps = self.kernels.rms_norm, self._eps
        parts = [norm(x, weight, eps) for weight, x in zip(self._feature_norms, streams, strict=True)]
        return self.kernels.linear(torch.cat(parts, -1), self._features)

    def read(
        self,
        ids: Tensor,
        features: Tensor,
        layout: PassLayout,
        attention: AttentionBackend,
        cache: KVCache,
        prepared: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead.read; the residual stream is carried."""
        compiled = self.native_head if isinstance(attention, NativeAttention) else None
        if compiled is not None and compiled.takes(len(ids)):
            return compiled.read(ids, features, layout, cache)
        if prepared is None:
            prepared = attention.prepare(layout)
        together, _ = self.beside(ids, features, (self._embed_norm, self._hidden_norm))
        residual = self.kernels.linear(together, self._fc)
        x, stream, _ = self.through_layers(residual, layout, attention, prepared, cache)
        return x, stream

    @property
    def embeds(self) -> Model:
        """The verifier."""
        return self.verifier

    def embed(self, ids: Tensor) -> Tensor:
        """As the verifier embeds."""
        return self.verifier.embed(ids)


def rows_of(weight: Weight, ids: Tensor | None, kernels: Kernels, quantization: Quantization | None = None) -> Weight:
    """Some rows of a weight, in its own format, or where that is none of eight bits as `quantization` says. ids None:
    all rows."""
    if isinstance(weight, Int8Weight | Int8Panels | Fp8Weight):
        if ids is None:
            return weight
        if isinstance(weight, Int8Panels):
            return kernels.pack(weight.some(ids))
        return kernels.pack(replace(weight, values=weight.values[ids], scale=weight.scale[ids]))
    if ids is None and quantization is None:
        return weight
    if isinstance(weight, PackedWeight):
        rows = weight.dequantize(weight.dtype) if ids is None else weight.rows(ids.long()).to(weight.dtype)
    else:
        rows = weight if ids is None else weight[ids].contiguous()
    return kernels.pack(rows if quantization is None else QUANTIZED[quantization].quantize(rows))


def vector(weight: Weight) -> Tensor:
    """A weight that is no matrix."""
    assert isinstance(weight, Tensor)
    return weight
