"""Acceptance of a head on held-out texts, without an engine. Knows texts and heads; nothing of training.

Greedy texts are walked span by span, as the engine walks them. For sampled texts the chance that a draft token stands
is exact, Σ min(p, q), at every position; later positions weigh by the chance that the tokens before them stood.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifypd.distil.head import Head
from verifypd.distil.teacher import Teacher
from verifypd.distil.text import Text, pad

BATCH_TOKENS = 8192


@dataclass(slots=True)
class Acceptance:
    """Counts (greedy) or expectations (sampled) by draft position."""

    depth: int
    drafted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0.0] * self.depth
        self.accepted = self.accepted or [0.0] * self.depth

    @property
    def alpha(self) -> list[float]:
        """Chance that the token at each position stands, given that those before it stood."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verify span emits, with drafts of this depth."""
        length, survival = 1.0, 1.0
        for alpha in self.alpha:
            survival *= alpha
            length += survival
        return length

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "alpha": [round(alpha, 4) for alpha in self.alpha],
            "mean_accepted_length": round(self.mean_accepted_length, 4),
            "spans": round(self.drafted[0]),
        }


@torch.no_grad()
def measure(
    head: Head, teacher: Teacher, texts: Sequence[Text], depth: int, tick: Callable[[int], object] = lambda _: None
) -> dict[str, dict[str, Acceptance]]:
    """Acceptance by temperature ("0.0", "0.8") and kind of prompt; kind "all" is all of them.

    tick: called with the number of texts of each pass.
    """
    found: dict[str, dict[str, Acceptance]] = defaultdict(lambda: defaultdict(lambda: Acceptance(depth)))
    ordered = sorted(texts, key=lambda text: (text.temperature, len(text.ids)))
    start = 0
    while start < len(ordered):
        temperature = ordered[start].temperature
        part = [ordered[start]]
        while start + len(part) < len(ordered) and len(part) * len(part[-1].ids) < BATCH_TOKENS:
            if ordered[start + len(part)].temperature != temperature:
                break
            part.append(ordered[start + len(part)])
        start += len(part)
        overlap, stands = _rows(head, teacher, part, temperature, depth)
        for i, text in enumerate(part):
            count = _walk if temperature == 0 else _expect
            for kind in {"all", text.kind or "all"}:
                count(found[f"{temperature:.1f}"][kind], text, overlap[:, i], stands[:, i])
        tick(len(part))
    return {temperature: dict(kinds) for temperature, kinds in found.items()}


def _rows(head: Head, teacher: Teacher, texts: Sequence[Text], temperature: float, depth: int) -> tuple[Any, Any]:
    """At each depth and row, numpy [depth, B, T]: the chance that a draft token stands, and that the own one does."""
    device = teacher.model.device
    ids = pad(texts).ids.to(device)
    following = torch.cat([ids[:, 1:], ids[:, :1]], 1).reshape(-1)
    lesson = teacher.read(ids)
    hidden = lesson.hidden.reshape(len(following), -1)
    place = torch.full((teacher.model.config.vocab_size,), -1, device=device)
    place[teacher.ids] = torch.arange(len(teacher.ids), device=device)
    column = place[following]
    if temperature:
        p, normaliser = teacher.probabilities(hidden, temperature)
        own = teacher.chance(hidden, following, normaliser, temperature)
    overlaps, stands = [], []
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        features = head.project(lesson.captured, lesson.hidden)
        streams = list(head.unroll(lesson.embedded, features, depth))
    for stream in streams:
        logits = head.logits(stream.reshape(len(following), -1), teacher.rows)
        if not temperature:
            match = (logits.argmax(-1) == column).float()
            overlap, stand = match, match
        else:
            q = (logits / temperature).softmax(-1)
            overlap = torch.minimum(p.float(), q).sum(-1)
            drawn = q.gather(1, column.clamp_min(0)[:, None])[:, 0] * (column >= 0)
            stand = (drawn / own.clamp_min(1e-9)).clamp_max(1.0)
        overlaps.append(overlap.view(ids.shape))
        stands.append(stand.view(ids.shape))
    return _host(torch.stack(overlaps)), _host(torch.stack(stands))


def _host(x: Tensor) -> Any:
    return x.float().cpu().numpy()


def _walk(count: Acceptance, text: Text, overlap: Any, stands: Any) -> None:
    """Spans one after another from the first token of the answer on, as long as a whole draft fits."""
    row = text.prompt
    while row + count.depth < len(text.ids):
        stood = 0
        for depth in range(count.depth):
            count.drafted[depth] += 1
            if not stands[depth, row + depth]:
                break
            count.accepted[depth] += 1
            stood += 1
        row += stood + 1


def _expect(count: Acceptance, text: Text, overlap: Any, stands: Any) -> None:
    """Every row weighs as much as it is likely to be the start of a span, as long as a whole draft fits."""
    rows = len(text.ids) - count.depth - text.prompt
    if rows <= 0:
        return
    weight = starts(stands[:, text.prompt :], rows)
    for depth in range(count.depth):
        at = slice(text.prompt + depth, text.prompt + depth + rows)
        count.drafted[depth] += float(weight.sum())
        count.accepted[depth] += float((weight * overlap[depth, at]).sum())
        weight = weight * stands[depth, at]


def starts(stands: Any, rows: int) -> Any:
    """The chance that a span starts at each of the first rows, [rows]. The first does; the next one follows what stood.

    stands [depth, T]: the chance that the token drafted at a depth and row is the one that was written.
    """
    depth = len(stands)
    chances = np.zeros(rows + depth + 1)
    chances[0] = 1.0
    for row in range(rows):
        alive = chances[row]
        for stood in range(depth):
            stays = alive * stands[stood, row + stood]
            chances[row + stood + 1] += alive - stays
            alive = stays
        chances[row + depth + 1] += alive
    return chances[:rows]


def report(found: dict[str, dict[str, Acceptance]]) -> dict[str, Any]:
    """All of it for JSON."""
    return {t: {kind: each.report() for kind, each in sorted(kinds.items())} for t, kinds in sorted(found.items())}


def score(found: dict[str, dict[str, Acceptance]]) -> float:
    """One number to choose by: the mean accepted length, over the temperatures measured."""
    lengths = [kinds["all"].mean_accepted_length for kinds in found.values()]
    return sum(lengths) / len(lengths)
