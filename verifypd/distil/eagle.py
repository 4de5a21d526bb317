"""A head of the EAGLE-3 architecture in training, and as a folder that other engines load. Knows no text.

It is what the `speculators` library calls eagle3, with `norm_before_residual` and without the flags of EAGLE-3.1: every
engine that loads such heads knows that much. Our own format reads the last hidden state besides, norms what it reads,
and cannot be written down in theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifypd.distil.export import size_fields, write_folder
from verifypd.distil.head import Head, HeadLayer, HeadShape, Norm, Seen, later, linear, shape_for
from verifypd.distil.teacher import Teacher
from verifypd.models.config import ModelConfig, Rope
from verifypd.models.eagle_config import default_states
from verifypd.models.head_loader import KINDS
from verifypd.models.layers import rope_tables


class FirstLayer(HeadLayer):
    """A layer whose attention reads token and feature side by side; the residual stream begins with the feature."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, linear(2 * shape.hidden, rows))

    def read(self, token: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        """token and feature [B, T, hidden]."""
        feature = self.hidden_norm(feature)
        x = torch.cat([self.input_layernorm(token), feature], -1)
        x = feature + self.self_attn.o_proj(self._attend(x, cos, sin, seen))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(Head):
    """All weights of a head, under the names its checkpoint has, but for embedding and output rows: the verifier's."""

    def __init__(self, shape: HeadShape) -> None:
        nn.Module.__init__(self)
        self.shape = shape
        self.fc = linear(len(shape.feature_layers) * shape.hidden, shape.hidden)
        rest = [HeadLayer(shape) for _ in range(shape.layers - 1)]
        self.layers = nn.ModuleList([FirstLayer(shape), *rest])
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self._rope = None

    def project(self, captured: tuple[Tensor, ...], hidden: Tensor) -> Tensor:
        """See Head.project; the last hidden state is not read."""
        projected: Tensor = self.fc(torch.cat(captured, -1))
        return projected

    def unroll(self, embedded: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """See Head.unroll. There is no row of position 0, whose stream is zero here."""
        shape, length = self.shape, embedded.shape[1]
        if self._rope is None or len(self._rope[0]) < length or self._rope[0].device != embedded.device:
            self._rope = rope_tables(Rope(shape.rope_theta), shape.head_dim, max(length, shape.window), embedded.device)
        cos, sin = (table[: length - 1] for table in self._rope)
        seen = [Seen([], []) for _ in range(shape.layers)]
        token, feature = embedded[:, 1:], features[:, :-1]
        first = cast(FirstLayer, self.layers[0])
        for _ in range(depth):
            x = first.read(token, feature, cos, sin, seen[0])
            for layer, past in zip(self.layers[1:], seen[1:], strict=True):
                x = layer(x, cos, sin, past)
            feature = later(x, 1)
            yield F.pad(x, (0, 0, 1, 0))


def eagle3_shape(
    verifier: ModelConfig, layers: int, mlp: int | None, features: tuple[int, ...] | None, vocab: int, window: int
) -> HeadShape:
    """As `shape_for`, with the states that EAGLE-3 heads read; their logits are not soft-capped."""
    if features is None:
        inside = (min(max(k - 1, 0), verifier.layers - 1) for k in default_states(verifier.layers))
        features = tuple(sorted(set(inside)))
    return replace(shape_for(verifier, layers, mlp, features, vocab, window), softcap=None)


def write_speculators(folder: Path, head: Head, teacher: Teacher, name: str, made: dict[str, Any]) -> None:
    """The head as the speculators library saves one. The embedding is written as the verifier uses it: scaled."""
    model, ids = teacher.model, teacher.ids
    vocab = model.config.vocab_size
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids.to("cpu")] = True
    with torch.no_grad():
        embedding = model.embed(torch.arange(vocab, device=model.device))
    floats = {**head.state_dict(), "embed_tokens.weight": embedding, "lm_head.weight": teacher.rows}
    weights = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in floats.items()}
    weights["d2t"] = (ids - torch.arange(len(ids), device=ids.device)).to("cpu", torch.int64).contiguous()
    weights["t2d"] = known
    config = speculators_config(head.shape, model.config, name, int(made["recipe"]["depth"]))
    write_folder(folder, weights, config, made)


def speculators_config(shape: HeadShape, verifier: ModelConfig, name: str, depth: int) -> dict[str, Any]:
    """The fields of a speculators eagle3 config."""
    layer = {
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        **size_fields(shape),
        "max_position_embeddings": verifier.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "sliding_window": shape.window,
        "layer_types": ["sliding_attention"] * shape.layers,
        "tie_word_embeddings": False,
        "vocab_size": verifier.vocab_size,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": shape.vocab,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.feature_layers],
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [KINDS[verifier.family][0]], "name_or_path": name},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": layer,
    }
