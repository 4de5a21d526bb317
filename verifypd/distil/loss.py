"""Losses between a draft's and the verifier's distribution. Knows rows of probabilities; nothing of models."""

from __future__ import annotations

import torch
from torch import Tensor


def loss_of(name: str, logits: Tensor, target: Tensor) -> Tensor:
    """Loss of each row [M]. logits fp32 [M, V] of the draft; target [M, V]: the verifier's probabilities of the same
    tokens, which sum to less than one where the draft's vocabulary lacks tokens.

    kl: forward cross-entropy. tv: one minus the chance that a drawn token stands. top: cross-entropy of the likeliest.
    """
    log_q = logits.log_softmax(-1)
    loss = -(target * log_q).sum(-1)
    if name == "kl+tv":
        loss = loss + 1.0 - torch.minimum(target.float(), log_q.exp()).sum(-1)
    elif name == "kl+top":
        best, at = target.max(-1, keepdim=True)
        # a likeliest token the draft cannot propose has the least target: weigh by how sure the verifier is
        loss = loss - (0.5 * best * log_q.gather(-1, at)).squeeze(-1)
    return loss
