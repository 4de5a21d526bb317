"""Losses between a draft's and the verifier's distribution. Knows rows of probabilities; nothing of models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PROBE_ROWS = 4096  # of the call that a compiler is tried with


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


def compiled_loss(name: str, vocab: int, device: torch.device) -> Callable[[str, Tensor, Tensor], Tensor]:
    """`loss_of` in two kernels each way, for any number of rows; itself on a CPU, or where the compiler fails."""
    if device.type != "cuda":
        return loss_of
    compiled = torch.compile(loss_of)

    def loss(name: str, logits: Tensor, target: Tensor) -> Tensor:
        for rows in (logits, target):
            torch._dynamo.maybe_mark_dynamic(rows, 0)
        each: Tensor = compiled(name, logits, target)
        return each

    try:
        logits = torch.zeros(PROBE_ROWS, vocab, device=device, requires_grad=True)
        target = torch.full((PROBE_ROWS, vocab), 1.0 / vocab, device=device, dtype=torch.bfloat16)
        with torch.autocast(device.type, torch.bfloat16), torch.autocast(device.type, enabled=False):
            loss(name, logits, target).sum().backward()  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001  # whatever a compiler may raise: plain operations do the same
        return loss_of
    return loss
