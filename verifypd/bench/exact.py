"""Whether an engine's texts are its verifier's own: checks on a small checkpoint written for the purpose.

Every check goes through `LLM` alone, and compares with plain decoding in float32 on the CPU by torch. Knows texts and
log-probabilities; nothing of kernels or schedules.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from verifypd import LLM, SamplingParams
from verifypd.bench.dummy import TINY
from verifypd.models.config import ModelConfig
from verifypd.models.llama import Llama

ARCHITECTURES = ("plain", "baseline", "pd", "pdv", "unified", "auto")
REFERENCE: dict[str, Any] = {
    "device": "cpu", "kernels": "torch", "attention": "torch", "sampler": "torch", "graphs": "off",
    "dtype": "float32", "arch": "plain", "draft": None, "batch_size": 1,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "max_draft": 4, "kv_memory": "64MB", "max_model_len": 250, "measure_costs": False, "prefix_cache": False,
}  # fmt: skip
TOP_K = 4  # tokens a draw of the χ² test may take


def write_pair(folder: Path, noise: float = 0.03, seed: int = 0, **changes: Any) -> tuple[str, str]:
    """A verifier with random weights, and a draft that is the same with noise: some of its tokens stand.

    changes: of the small model's config, e.g. head_dim=64.
    """
    shape = {**TINY, **changes}
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for spec in Llama.specs(ModelConfig.from_dict(shape)).values():
        for name, rows in spec.pieces:
            size = (rows,) if spec.columns is None else (rows, spec.columns)
            each = torch.randn(size, generator=generator) * (0.3 if spec.columns else 0.1) + (not spec.columns)
            weights[f"model.{name}"] = each
    noisy = {
        name: each + noise * each.std() * torch.randn(each.shape, generator=generator) if each.dim() == 2 else each
        for name, each in weights.items()
    }
    paths = []
    for name, tensors in (("verifier", weights), ("draft", noisy)):
        path = folder / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(shape))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        paths.append(str(path))
    return paths[0], paths[1]


def prompts(count: int) -> list[list[int]]:
    """Token ids, of many lengths."""
    return [[3 + (i * 17 + j * j * 7) % 380 for j in range(1 + (i * 13) % 47)] for i in range(count)]


def texts(
    model: str, draft: str | None, params: Sequence[SamplingParams], ids: list[list[int]], **settings: Any
) -> Any:
    """Output tokens of every prompt."""
    with LLM(model, **{**SHAPE, "draft": draft, **settings}) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(ids, list(params))]
        accepted = llm.engine.stats.accepted
        llm.engine.drain()
        llm.engine.check()
    return found, accepted


def same_texts(pair: tuple[str, str], tokens: int = 60, count: int = 12, **settings: Any) -> dict[str, Any]:
    """float32, greedy and seeded requests side by side: every architecture gives what the reference gives."""
    ids = prompts(count)
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    params = [
        greedy if i % 2 else SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(count)
    ]
    expected, _ = texts(pair[0], None, params, ids, **{k: v for k, v in REFERENCE.items() if k != "draft"})
    found: dict[str, Any] = {}
    for arch in ARCHITECTURES:
        draft = None if arch == "plain" else pair[1]
        controller = "throughput" if arch == "auto" else "fixed"
        options = {"arch": arch, "controller": controller, "dtype": "float32", "batch_size": 8, "prefill_chunk": 16}
        given, accepted = texts(pair[0], draft, params, ids, **options, **settings)
        equal = sum(a == b for a, b in zip(given, expected, strict=True))
        found[arch] = {"equal": equal, "of": count, "accepted": accepted}
    found["passed"] = all(found[a]["equal"] == count and (found[a]["accepted"] or a == "plain") for a in ARCHITECTURES)
    return found


def teacher_forced(pair: tuple[str, str], tokens: int = 60, count: int = 8, **settings: Any) -> dict[str, Any]:
    """bfloat16, greedy: every token lies within ε of the likeliest one by float32's account of the same text.

    ε is twice the largest difference that bfloat16 makes to the log-probability of any of these tokens.
    """
    ids = prompts(count)
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    options = {"arch": "unified", "controller": "fixed", "dtype": "bfloat16", "batch_size": 8}
    given, accepted = texts(pair[0], pair[1], [greedy] * count, ids, **options, **settings)
    whole = [[*prompt, *output] for prompt, output in zip(ids, given, strict=True)]
    room = settings.get("max_model_len", SHAPE["max_model_len"])
    exact = _scored(pair[0], whole, **REFERENCE, max_model_len=room)
    rounded = _scored(pair[0], whole, **{**settings, "arch": "plain", "draft": None, "dtype": "bfloat16"})
    behind, moved = 0.0, 0.0
    for prompt, right, wrong in zip(ids, exact, rounded, strict=True):
        for (own, top), (other, _) in zip(right[len(prompt) :], wrong[len(prompt) :], strict=True):
            behind, moved = max(behind, top - own), max(moved, abs(own - other))
    return {
        "behind": behind,
        "epsilon": 2 * moved,
        "accepted": accepted,
        "passed": behind <= 2 * moved and accepted > 0,
    }


def _scored(model: str, whole: list[list[int]], **settings: Any) -> list[list[tuple[float, float]]]:
    """(own, highest) log-probability of every token of a text; the first has none."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(model, **{**SHAPE, **settings}) as llm:
        outputs = llm.generate(whole, params)
    return [
        [(0.0, 0.0) if each is None else (each[token].logprob, max(e.logprob for e in each.values())) for token, each in
         zip(text, output.prompt_logprobs or (), strict=True)]
        for text, output in zip(whole, outputs, strict=True)
    ]  # fmt: skip


def same_in_any_company(pair: tuple[str, str], tokens: int = 60, count: int = 12, **settings: Any) -> dict[str, Any]:
    """bfloat16 with `batch_invariant`: a request writes the same text alone and plain as speculated among others."""
    ids = prompts(count)
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=tokens, ignore_eos=True) for i in range(count)
    ]
    options = {"dtype": "bfloat16", "batch_invariant": True, **settings}
    alone, _ = texts(pair[0], None, params, ids, arch="plain", batch_size=1, **options)
    many = {"arch": "unified", "controller": "fixed", "batch_size": count, "prefill_chunk": 16}
    crowd, accepted = texts(pair[0], pair[1], params, ids, **many, **options)
    equal = sum(a == b for a, b in zip(alone, crowd, strict=True))
    return {"equal": equal, "of": count, "accepted": accepted, "passed": equal == count and accepted > 0}


def right_distribution(pair: tuple[str, str], draws: int = 4000, **settings: Any) -> dict[str, Any]:
    """Rejection sampling under a controller that moves: χ² of the first three tokens, each given those before it."""
    prompt = prompts(3)[2]
    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=3, ignore_eos=True)
    options = {"arch": "unified", "controller": "threshold", "batch_size": 64, "dtype": "float32", "seed": 7}
    given, accepted = texts(pair[0], pair[1], [params] * draws, [prompt] * draws, **options, **settings)
    seen = Counter(tuple(text) for text in given)
    prefixes = sorted({text[:n] for text in seen for n in range(3)})
    chances = _chances(pair[0], [[*prompt, *prefix] for prefix in prefixes])
    rows, passed = [], accepted > 0
    for position in range(3):
        expected: Counter[tuple[int, ...]] = Counter()
        found: Counter[tuple[int, ...]] = Counter()
        for text, times in seen.items():
            found[text[: position + 1]] += times
        for prefix, chance in zip(prefixes, chances, strict=True):
            if len(prefix) == position:
                before = sum(times for text, times in seen.items() if text[:position] == prefix)
                expected.update({(*prefix, token): before * p for token, p in chance.items()})
        freedom = sum(1 for value in expected.values() if value > 0) - len({key[:-1] for key in expected})
        chi2 = sum((found[key] - value) ** 2 / value for key, value in expected.items() if value > 0)
        limit = freedom + 10 * math.sqrt(2 * freedom)
        strange = sum(times for key, times in found.items() if key not in expected)
        passed = passed and chi2 < limit and not strange
        rows.append({"position": position, "chi2": chi2, "freedom": freedom, "limit": limit, "strange": strange})
    return {"positions": rows, "accepted": accepted, "passed": passed}


def _chances(model: str, texts_: list[list[int]]) -> list[dict[int, float]]:
    """What each text is followed by, among its likeliest `TOP_K` tokens, by the reference."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP_K, ignore_eos=True)
    with LLM(model, **{**SHAPE, **REFERENCE}) as llm:
        outputs = llm.generate(texts_, params)
    found = []
    for output in outputs:
        entries = (output.outputs[0].logprobs or [{}])[0]
        top = sorted(entries.items(), key=lambda item: -item[1].logprob)[:TOP_K]
        total = sum(math.exp(entry.logprob) for _, entry in top)
        found.append({token: math.exp(entry.logprob) / total for token, entry in top})
    return found


def check_all(folder: Path, draws: int = 4000, tokens: int = 60, **settings: Any) -> dict[str, Any]:
    """Every check, by name; `batch_invariant` ones where the device has kernels for it."""
    pair = write_pair(folder)
    return {
        "float32": same_texts(pair, tokens, **settings),
        "bfloat16": teacher_forced(pair, tokens, **settings),
        "batch_invariant": same_in_any_company(pair, tokens, **settings),
        "distribution": right_distribution(pair, draws, **settings),
    }
