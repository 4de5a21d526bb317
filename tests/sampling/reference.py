"""A slow, independent statement of the transforms: one row at a time, float64, with the history spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifypd.request import SamplingParams


def transformed(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    eos_ids: Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    mask: np.ndarray | None = None,
    scale: float = 1.0,
) -> tuple[np.ndarray, float]:
    """Transformed logits, and how close the nearest cut was (for tests to leave out what rounding decides)."""
    x = np.array(logits, dtype=np.float64)
    x[np.isnan(x)] = -np.inf
    margin = np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -np.inf
    for word in bad_words_ids:
        *before, last = word
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        for token in [*eos_ids, *(params.stop_token_ids or ())]:
            x[token] = -np.inf
    for token in range(len(x)):
        if token in prompt or token in output:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count = list(output).count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if mask is not None:
        x[~mask] = -np.inf
    if params.greedy or not np.isfinite(x).any():
        return x, margin
    x /= params.temperature * scale
    if params.min_p > 0:
        ratio = probabilities(x) / probabilities(x).max()
        margin = min(margin, np.abs(ratio - params.min_p).min())
        x[ratio < params.min_p] = -np.inf
    if 0 < params.top_k < len(x):
        kth = np.sort(x)[-params.top_k]
        x[x < kth] = -np.inf
    if params.top_p < 1:
        p = probabilities(x)
        order = np.argsort(-p, kind="stable")
        mass = np.cumsum(p[order])
        margin = min(margin, np.abs(mass - params.top_p).min())
        last = p[order[min(int((mass < params.top_p).sum()), len(x) - 1)]]
        x[p < last] = -np.inf
    return x, margin


def probabilities(x: np.ndarray) -> np.ndarray:
    """Softmax."""
    weights = np.exp(x - x.max())
    return weights / weights.sum()
