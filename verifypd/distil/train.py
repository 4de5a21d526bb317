"""Trains a head: pilots that choose the loss, then the run itself. Knows heads, teachers and texts; writes no draft.

A step is decided by the recipe and its number alone, so a run that was stopped goes on from its checkpoint as if it had
not been.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifypd.distil.eagle import Eagle3Head
from verifypd.distil.export import read_draft, whole
from verifypd.distil.head import Head, HeadShape
from verifypd.distil.loss import loss_of
from verifypd.distil.measure import measure, report, score
from verifypd.distil.recipe import Recipe
from verifypd.distil.teacher import Teacher
from verifypd.distil.text import Batch, Text, batches
from verifypd.errors import ConfigError
from verifypd.progress import Bar, bar

log = logging.getLogger(__name__)

FLOOR = 0.02  # of the learning rate, at the end
LOOKS = 24  # measurements along a run
CLIP = 1.0
SAVE = 250  # steps between two checkpoints
WARM, PACED = 20, 80  # steps before and while the pace is taken
FILLED = 0.97  # of the time that is left, by that pace


class Trainer:
    """One head in training."""

    def __init__(
        self,
        teacher: Teacher,
        shape: HeadShape,
        recipe: Recipe,
        texts: Sequence[Text],
        validation: Sequence[Text],
        folder: Path,
        check: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> None:
        """deadline: on the monotonic clock, where the steps are to be as many as fit until then."""
        self.teacher = teacher
        self.shape = shape
        self.recipe = recipe
        self.texts = texts
        self.validation = validation
        self.folder = folder
        self.check = check
        self.deadline = deadline
        self.fitted: int | None = None  # steps, where they follow the time
        self.looks: list[float] = []  # s of each measurement along the run
        self.device = teacher.model.device
        self.loss = recipe.losses[0]
        self.step = 0
        self.curve: list[dict[str, Any]] = []
        self.pilots: dict[str, float] = {}
        self._start()

    def _start(self) -> None:
        """A fresh head, or the given draft's; the same seed gives the same weights."""
        torch.manual_seed(self.recipe.seed)
        self.head = (Eagle3Head if self.recipe.format == "speculators" else Head)(self.shape).to(self.device)
        if self.recipe.start is not None:
            self.head.load_state_dict(read_draft(Path(self.recipe.start), self.shape))
        else:
            with torch.no_grad():
                self.head.norm.weight.copy_(final_norm(self.teacher))
        decayed = [p for p in self.head.parameters() if p.dim() == 2]
        plain = [p for p in self.head.parameters() if p.dim() != 2]
        groups = [{"params": decayed, "weight_decay": self.recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self.recipe.learning_rate, betas=(0.9, 0.95), fused=fused)
        self.step, self.curve = 0, []

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Pilots unless one loss is given, then every step that is left. Raises Deadline with a checkpoint written."""
        if not self._resume() and len(self.recipe.losses) > 1 and self.recipe.pilot_steps:
            self._choose()
        if self.deadline is not None and self.fitted is None:
            self._fit(self.deadline)
        if self.fitted is not None:
            self.recipe = replace(self.recipe, steps=self.fitted)
        self._train(self.recipe.steps, self.save)

    def _fit(self, deadline: float) -> None:
        """Some steps, and from how long they and a look take the number of all: the rate falls until the deadline."""
        self._train(self.step + WARM, self.save)
        begun, before = time.monotonic(), len(self.looks)
        self._train(self.step + PACED, self.save)
        now, looks = time.monotonic(), self.looks[before:]
        pace = (now - begun - sum(looks)) / PACED
        left = (deadline - now) * FILLED - LOOKS * max(looks, default=0.0)
        self.fitted = self.step + max(1, int(left / pace))
        log.info("%.3f s a step: %d steps until the time is up", pace, self.fitted)

    def _choose(self) -> None:
        """Each loss from the same start for the same steps; the one that gets most tokens accepted goes on."""
        path = self.folder / "pilots.pt"
        kept = self._read(path) or {"scores": {}, "best": None, "running": None}
        self.pilots = dict(kept["scores"])

        def keep() -> None:
            kept.update(scores=dict(self.pilots), running=self._state())
            self._write(path, kept)

        for name in self.recipe.losses:
            if name in self.pilots:
                continue
            self._start()
            self.loss = name
            if kept["running"] is not None and kept["running"]["loss"] == name:
                self._restore(kept["running"])
            self._train(self.recipe.pilot_steps, keep)
            self.pilots[name] = round(score(self._measure()), 4)
            log.info("loss %s: mean accepted length %.3f after %d steps", name, self.pilots[name], self.step)
            if self.pilots[name] >= max(self.pilots.values()):
                kept["best"] = self._state()
            keep()
        self._restore(kept["best"])
        self.save()
        path.unlink()

    def _train(self, until: int, keep: Callable[[], None]) -> None:
        """Steps up to `until`. What was done is kept at the end, every so many steps, and when time is up."""
        try:
            self._steps(until, keep)
        finally:
            keep()

    def _steps(self, until: int, keep: Callable[[], None]) -> None:
        feed = batches(self.texts, self.recipe.batch_tokens, self.recipe.seed, self.step)
        look = max(1, self.recipe.steps // LOOKS)
        shown = bar(total=until, initial=self.step, desc=f"training, {self.loss}", unit="steps")
        with shown:
            while self.step < until:
                self.check()
                losses = self.train_step(next(feed))
                self.step += 1
                shown.update()
                if self.step % look == 0 or self.step == until:
                    self._look(losses, shown)
                    last = self.curve[-1]["validation"]["0.0"]["all"]
                    shown.set_postfix_str(
                        f"α {last['alpha'][0]:.3f}, accepted {last['mean_accepted_length']:.2f}", refresh=False
                    )
                if self.step % SAVE == 0:
                    keep()

    def train_step(self, batch: Batch) -> Tensor:
        """One update; returns the loss at each depth, [depth]."""
        recipe = self.recipe
        rows, starts = supervised(batch)  # on the host: shapes are known without waiting for the device
        batch = batch.to(self.device)
        rows, starts = rows.to(self.device, non_blocking=True), starts.to(self.device, non_blocking=True)
        lesson = self.teacher.read(batch.ids)
        target, _ = self.teacher.probabilities(lesson.hidden.flatten(0, 1)[rows])
        losses = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            features = self.head.project(lesson.captured, lesson.hidden)
            for depth, stream in enumerate(self.head.unroll(lesson.embedded, features, recipe.depth)):
                logits = self.head.logits(stream.flatten(0, 1)[rows], self.teacher.rows)
                with torch.autocast(self.device.type, enabled=False):
                    each = loss_of(self.loss, logits, target)
                    weight = (starts >= depth).float()  # a draft of this depth began in the answer
                    losses.append((each * weight).sum() / weight.sum().clamp_min(1.0))
        weights = [recipe.depth_decay**depth for depth in range(recipe.depth)]
        total = sum((w * loss for w, loss in zip(weights, losses, strict=True)), torch.zeros((), device=self.device))
        self.optimizer.zero_grad(set_to_none=True)
        (total / sum(weights)).backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate(self.step, recipe)
        self.optimizer.step()
        return torch.stack(losses).detach()

    def _look(self, losses: Tensor, shown: Bar) -> None:
        begun = time.monotonic()
        found = report(self._measure(lambda _: shown.update(0)))
        self.looks.append(time.monotonic() - begun)
        self.curve.append({"step": self.step, "loss": [round(x, 4) for x in losses.tolist()], "validation": found})

    def _measure(self, tick: Callable[[int], object] = lambda _: None) -> Any:
        return measure(self.head, self.teacher, self.validation, self.recipe.depth, tick)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self.folder / "checkpoint.pt"

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "head": {name: x.detach().clone() for name, x in self.head.state_dict().items()},
            "optimizer": _copied(self.optimizer.state_dict()),
            "curve": json.dumps(self.curve),
            "pilots": dict(self.pilots),
            "fitted": self.fitted,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss = state["step"], state["loss"]
        self.curve = json.loads(state["curve"])
        self.pilots = {**state["pilots"], **self.pilots}
        self.fitted = state.get("fitted")

    def save(self) -> None:
        """Write the checkpoint whole, or not at all."""
        self._write(self._path, self._state())

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        with whole(path) as beside:
            torch.save({"recipe": self._recipe, **state}, beside)

    @property
    def _recipe(self) -> str:
        """What a run that goes on must have in common; it may become longer or shorter."""
        return json.dumps({name: value for name, value in asdict(self.recipe).items() if name != "steps"})

    def _read(self, path: Path) -> dict[str, Any] | None:
        """What was kept there, if it was made with the same settings."""
        if not path.exists():
            return None
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        found, own = json.loads(state.get("recipe", "{}")), json.loads(self._recipe)
        found.setdefault("format", "verifypd")  # the only one, once
        if found != own:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in own if found.get(name) != own[name])
            raise ConfigError(
                f"{path} was made with other settings ({names}): give the same ones to go on,"
                " another --out to start anew, or delete that file to train again on the same text"
            )
        return state

    def _resume(self) -> bool:
        state = self._read(self._path)
        if state is None:
            return False
        self._restore(state)
        log.info("going on from step %d", self.step)
        return True


def supervised(batch: Batch) -> tuple[Tensor, Tensor]:
    """Flat rows [M] of a batch that predict a token of an answer, and how far into the answer each is [M]."""
    at = torch.arange(batch.ids.shape[1])
    first = batch.prompts[:, None] - 1
    mask = (at >= first) & (at <= batch.lengths[:, None] - 2)
    return mask.reshape(-1).nonzero()[:, 0], (at - first)[mask]


def rate(step: int, recipe: Recipe) -> float:
    """Share of the learning rate at a step: warm-up, level, then down in a line."""
    up = min(1.0, (step + 1) / max(1, recipe.warmup))
    left = (recipe.steps - step) / max(1.0, recipe.decay * recipe.steps)
    return up * max(FLOOR, min(1.0, left))


def final_norm(teacher: Teacher) -> Tensor:
    """The verifier's last norm as a plain scale: where the head's own starts, since both feed the same matrix."""
    weight = teacher.model.layers[-1].next_norm.float()
    return weight + 1.0 if teacher.model.config.unit_offset else weight


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(each) for each in state] if isinstance(state, list) else state
