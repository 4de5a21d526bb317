"""What rounding does to text: how far it moves the law of the next token, and how many drafts still stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from verifypd import LLM, SamplingParams

BASE = "float32"  # the arm that others are held against


def moved(prompts: Iterable[Tensor], arms: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, dict[str, Any]]:
    """By arm, over all positions of the prompts: KL from float32, and how often the likeliest token is the same.

    prompts: [tokens] each; arms: a prompt's logits, [tokens, vocabulary].
    """
    kl: dict[str, list[Tensor]] = defaultdict(list)
    same: dict[str, list[Tensor]] = defaultdict(list)
    for ids in prompts:
        laws = {name: logits(ids).double().log_softmax(-1) for name, logits in arms.items()}
        base = laws.pop(BASE)
        for name, law in laws.items():
            kl[name].append((base.exp() * (base - law)).sum(-1))
            same[name].append(law.argmax(-1) == base.argmax(-1))
    return {
        name: {
            "positions": sum(map(len, parts)),
            "mean_kl": float(torch.cat(parts).mean()),
            "p99_kl": float(torch.cat(parts).quantile(0.99)),
            "argmax_agreement": float(torch.cat(same[name]).double().mean()),
        }
        for name, parts in kl.items()
    }


def accepted(texts: list[str], tokens: int, **settings: Any) -> dict[str, Any]:
    """Drafts of the built-in pair that stand, greedy, four a pass, on a CPU in float32 but for `settings`."""
    options: dict[str, Any] = {
        "draft": "smollm2-draft", "arch": "unified", "controller": "fixed", "max_draft": 4, "dtype": "float32",
        "device": "cpu", "batch_size": 8, "kv_memory": "256MB", "max_model_len": 512, **settings,
    }  # fmt: skip
    with LLM("smollm2", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        metrics = [output.metrics for output in llm.generate(texts, params)]
        held = llm.budget.tokens
    spans, drafted, stood = (sum(getattr(m, name) for m in metrics) for name in ("spans", "drafted", "accepted"))
    return {
        "acceptance_rate": stood / drafted, "tokens_a_pass": 1 + stood / spans, "spans": spans, "kv_tokens": held,
    }  # fmt: skip
