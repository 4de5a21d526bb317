"""The verifier as a teacher: what a head reads of it, and the probabilities it should learn. No gradient runs here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.distil.dense import read_features
from verifypd.models.base import Model

LOGIT_ROWS = 4096  # rows whose full logits are held at once


@dataclass(frozen=True, slots=True)
class Lesson:
    """One pass of the verifier over a batch of texts."""

    embedded: Tensor  # [B, T, H]
    captured: tuple[Tensor, ...]  # each [B, T, H]
    hidden: Tensor  # [B, T, H]


class Teacher:
    """A verifier and the part of its vocabulary a draft may propose."""

    def __init__(self, model: Model, capture: tuple[int, ...], ids: Tensor) -> None:
        """ids [V]: the tokens the draft may propose."""
        self.model = model
        self.capture = capture
        self.ids = ids.to(model.device)
        head = model.head
        self.rows = (head[self.ids] if isinstance(head, Tensor) else head.rows(self.ids)).to(model.activation_dtype)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Lesson:
        """ids [B, T]."""
        hidden, captured = read_features(self.model, ids, self.capture)
        return Lesson(self.model.embed(ids.reshape(-1)).view(hidden.shape), captured, hidden)

    @torch.no_grad()
    def probabilities(self, hidden: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Of hidden [M, H]: the draft's tokens' probabilities [M, V] in the activation dtype, and log Z [M] of all."""
        total, parts = [], []
        cap = self.model.config.logit_softcap
        for part in hidden.split(LOGIT_ROWS):
            full = self.model.logits(part)
            normaliser = (full if temperature == 1.0 else full / temperature).logsumexp(-1)
            logits = F.linear(part, self.rows).float()
            logits = logits if cap is None else torch.tanh(logits / cap) * cap
            parts.append((logits / temperature - normaliser[:, None]).exp().to(self.rows.dtype))
            total.append(normaliser)
        return torch.cat(parts), torch.cat(total)

    @torch.no_grad()
    def chance(self, hidden: Tensor, tokens: Tensor, normaliser: Tensor, temperature: float) -> Tensor:
        """Probability [M] of the tokens [M] the text goes on with."""
        found = [
            self.model.logits(part).gather(1, ids[:, None])[:, 0]
            for part, ids in zip(hidden.split(LOGIT_ROWS), tokens.split(LOGIT_ROWS), strict=True)
        ]
        return (torch.cat(found) / temperature - normaliser).exp()
