"""Draft heads for engine tests: random ones, and ones that were taught a little, so that some of their drafts stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.checkpoints import VOCAB
from verifypd import LLM, SamplingParams
from verifypd.distil.eagle import Eagle3Head, eagle3_shape, write_speculators
from verifypd.distil.export import write_draft
from verifypd.distil.head import Head, HeadShape, shape_for
from verifypd.distil.teacher import Teacher
from verifypd.kernels.torch import TorchKernels
from verifypd.models.config import ModelConfig
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model

STEPS = 24  # more do not make more drafts stand


def make_head(shape: HeadShape, seed: int = 0, kind: type[Head] = Head) -> Head:
    """A random head, norms included."""
    torch.manual_seed(seed)
    head = kind(shape)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.05)
    return head


def teach(head: Head, verifier: Path, ids: torch.Tensor, texts: torch.Tensor | None = None, steps: int = STEPS) -> None:
    """A few steps on the verifier's greedy text: enough that a draft stands now and then. texts [B, T]: on those."""
    model = load_model(resolve(str(verifier)), dtype=torch.float32, device="cpu", kernels=TorchKernels())
    teacher = Teacher(model, head.shape.feature_layers, ids)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    if texts is None:
        texts = continued(verifier, torch.randint(3, VOCAB, (48, 4), generator=generator), 28)
    lessons = []
    for part in range(min(4, steps)):  # each is given many times, and read once
        lesson = teacher.read(texts[part::4])
        rows = lesson.hidden.shape[0] * lesson.hidden.shape[1]
        lessons.append((lesson, rows, model.logits(lesson.hidden.reshape(rows, -1))[:, ids].argmax(-1)))
    for step in range(steps):
        lesson, rows, target = lessons[step % 4]
        features = head.project(lesson.captured, lesson.hidden)
        loss = torch.zeros(())
        for stream in head.unroll(lesson.embedded, features, 2):
            logits = head.logits(stream, teacher.rows).reshape(rows, -1)
            loss = loss + torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def continued(verifier: Path, texts: torch.Tensor, tokens: int) -> torch.Tensor:
    """texts [B, T] with as many more tokens of greedy text."""
    options: dict[str, Any] = {"arch": "plain", "controller": "fixed", "measure_costs": False, "prefix_cache": False}
    options |= {"dtype": "float32", "device": "cpu", "kv_memory": "32MB", "max_model_len": 64, "batch_size": len(texts)}
    with LLM(str(verifier), draft=None, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate(texts.tolist(), params)
    return torch.cat([texts, torch.tensor([output.outputs[0].token_ids for output in outputs])], 1)


def head_for(
    verifier: Path, to: Path, *, layers: int = 1, window: int = 24, vocab: int = 300, taught: bool = True
) -> Path:
    """Write a head for the checkpoint in `verifier`; its window is shorter than the texts of tests."""
    config = ModelConfig.from_folder(verifier)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:vocab].sort().values
    head = make_head(shape_for(config, layers, 48, None, vocab, window))
    if taught:
        teach(head, verifier, ids)
    write_draft(to, head, ids, config, str(verifier), {})
    return to


def eagle3_for(
    verifier: Path,
    to: Path,
    *,
    layers: int = 1,
    window: int = 24,
    vocab: int = 300,
    taught: bool = True,
    texts: torch.Tensor | None = None,
    steps: int = STEPS,
) -> Path:
    """The same of the EAGLE-3 architecture, as a speculators checkpoint."""
    model = load_model(resolve(str(verifier)), dtype=torch.float32, device="cpu", kernels=TorchKernels())
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:vocab].sort().values
    head = make_head(eagle3_shape(model.config, layers, 48, None, vocab, window), kind=Eagle3Head)
    if taught:
        teach(head, verifier, ids, texts, steps)
    teacher = Teacher(model, head.shape.feature_layers, ids)
    write_speculators(to, head, teacher, str(verifier), {"recipe": {"depth": 3}})
    return to
