"""Verifier and draft folders for engine tests, and what plain greedy decoding of the verifier gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.checkpoints import reference_logits
from verifypd import LLM
from verifypd.request import Request


def noisy_copy(folder: Path, to: Path, noise: float, seed: int = 1) -> Path:
    """A draft for `folder`: the same weights with noise, so that some drafts stand and some do not."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(seed)
    for path in to.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            if weight.dim() == 2:
                scale = noise * weight.std()
                weights[name] = weight + scale * torch.randn(weight.shape, generator=generator)
        save_file(weights, path, metadata={"format": "pt"})
    return to


def preempt_every(llm: LLM, steps: int) -> None:
    """From now on the youngest request is preempted every `steps` steps, as if memory had run out."""
    engine, original = llm.engine, llm.engine.step

    def step() -> list[Request]:
        running = [r for r in engine.running.values() if not r.finished and not r.preempting]
        if steps and engine.stats.steps % steps == steps - 1 and len(running) > 1:
            engine.residents.preempt(max(running, key=Request.rank))
        return original()

    engine.step = step  # type: ignore[method-assign]


PROVEN: dict[tuple[Path, tuple[int, ...]], list[int]] = {}  # the longest output found greedy, of folder and prompt


def assert_greedy(folder: Path, prompt: list[int], output: list[int], slack: float = 0.0) -> None:
    """Every output token is transformers' argmax after the tokens before it: by induction, its greedy text.

    The beginning of a text that was found so is not computed again.
    """
    proven = PROVEN.get((folder, tuple(prompt)), [])
    if output == proven[: len(output)]:
        return
    logits = reference_logits(folder, [*prompt, *output])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    behind = logits.max(1).values - chosen
    wrong = (behind > slack).nonzero()
    assert not len(wrong), (
        f"output {int(wrong[0])} of {len(output)} is {behind[wrong[0]].item():.2e} behind the maximum"
    )
    if not slack and len(output) > len(proven):
        PROVEN[folder, tuple(prompt)] = output
