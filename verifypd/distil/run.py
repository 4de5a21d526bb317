"""`distil`: from a verifier to a draft in a folder, stage by stage, each kept. Knows every stage; computes nothing."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifypd import __version__
from verifypd.config import EngineConfig
from verifypd.distil.dense import BatchKernels
from verifypd.distil.eagle import eagle3_shape, write_speculators
from verifypd.distil.export import commit_here, how_made, read_draft, whole, write_draft, write_json
from verifypd.distil.head import HeadShape, shape_for
from verifypd.distil.measure import measure, report
from verifypd.distil.plot import draw_curve
from verifypd.distil.prompts import Prompt
from verifypd.distil.recipe import Recipe
from verifypd.distil.teacher import Teacher
from verifypd.distil.text import Deadline, Text, Writer, load, load_all
from verifypd.distil.train import Trainer
from verifypd.engine.build import pick_device, read_tokenizer
from verifypd.engine.sizes import check_memory
from verifypd.errors import ConfigError
from verifypd.kernels.torch import TorchKernels
from verifypd.models.base import Model
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.progress import bar
from verifypd.tokenizer import Tokenizer

log = logging.getLogger(__name__)

RESERVE = 25.0  # s before a time limit, kept for the evaluation and for writing


def distil(
    model: str,
    out: Path,
    recipe: Recipe,
    *,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    device: str = "auto",
    time_limit: float | None = None,
    fit_steps: bool = False,
    name: str | None = None,
    commit: str | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Make or go on making the draft in `out`/draft; returns what its distil.json says.

    time_limit: seconds after which it writes what it has and stops; the same call again goes on. fit_steps: as many
    steps as that limit leaves time for, by the pace of the first, in place of the recipe's. name: what the draft's
    files call the verifier, where that is not what it was loaded by.
    """
    begun = time.monotonic()
    deadline = None if time_limit is None else begun + time_limit - RESERVE
    if fit_steps and deadline is None:
        raise ConfigError("--fit-steps needs --time-limit: steps are fitted to that time")
    check = _until(deadline)
    verifier, tokenizer, stop_ids = load_verifier(model, pick_device(device), recipe)
    began_with = None
    if recipe.start is not None:
        read_draft(Path(recipe.start), _shape(verifier, recipe, recipe.vocab))  # refused before hours of text
        began_with = how_made(Path(recipe.start))
    work = out / "work"
    try:
        Writer(verifier, tokenizer, stop_ids, recipe, work, check).write(prompts, held_out)
    except Deadline:
        log.warning("time is up while text is being written: run the same command again to go on")
        return {"finished": False, "stage": "text"}
    texts = load_all(work)
    ids, coverage = choose_vocab(texts, recipe.vocab, verifier.config.vocab_size, stop_ids)
    shape = _shape(verifier, recipe, len(ids))
    teacher = Teacher(verifier, shape.feature_layers, ids)
    trainer = Trainer(
        teacher, shape, recipe, texts, load(work / "validation.npz"), work, check, deadline if fit_steps else None
    )
    finished = True
    try:
        trainer.run()
    except Deadline:
        finished = False
        log.warning(
            "time is up at step %d of %d: run the same command again to go on", trainer.step, trainer.recipe.steps
        )
    held_out_texts = load(work / "evaluation.npz")
    with bar(total=len(held_out_texts), desc="evaluation", unit="texts") as shown:
        evaluation = measure(trainer.head, teacher, held_out_texts, recipe.depth, shown.update)
    made = {
        "finished": finished,
        "verifier": name or model,
        "command": command,
        "commit": commit or commit_here(),
        "versions": {"verifypd": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine(verifier.device),
        "seconds": round(time.monotonic() - begun, 1),
        "recipe": asdict(trainer.recipe),
        "texts": len(texts),
        "tokens": sum(len(text.ids) - text.prompt for text in texts),
        "prompts": len(load(work / "prompts.npz")),
        "vocabulary": coverage,
        "parameters": sum(p.numel() for p in trainer.head.parameters()),
        "loss": trainer.loss,
        "pilots": trainer.pilots,
        "steps": trainer.step,
        "evaluation": report(evaluation),
        "start": began_with,  # how the draft was made that it began with
    }
    if recipe.format == "speculators":
        write_speculators(out / "draft", trainer.head, teacher, name or model, made)
    else:
        write_draft(out / "draft", trainer.head, ids, verifier.config, name or model, made)
    with whole(out / "curve.json") as path:
        write_json(path, {"curve": trainer.curve})
    draw_curve(trainer.curve, out / "curve.png")
    return made


def _shape(verifier: Model, recipe: Recipe, vocab: int) -> HeadShape:
    make = eagle3_shape if recipe.format == "speculators" else shape_for
    return make(verifier.config, recipe.layers, recipe.mlp_size, recipe.feature_layers, vocab, recipe.window)


def load_verifier(model: str, device: torch.device, recipe: Recipe) -> tuple[Model, Tokenizer, tuple[int, ...]]:
    """The verifier ready for whole batches, its tokenizer, and the ids an answer ends with."""
    source = resolve(model)
    tokenizer = read_tokenizer(source)
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer here, and a draft is made from text: give a folder that has one")
    longest = recipe.max_prompt + recipe.max_new
    if longest > source.config.max_position:
        raise ConfigError(
            f"texts of {longest} tokens are past the {source.config.max_position} that {model} can read:"
            " lower --max-prompt or --max-new"
        )
    deepest, layers = max(recipe.feature_layers or (0,)), source.config.layers
    if deepest >= layers:
        raise ConfigError(f"--feature-layers: {model} has no layer {deepest}; the last is {layers - 1}")
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    check_memory(EngineConfig(max_model_len=longest), source, None, device, weights=dtype)
    verifier = load_model(
        source,
        dtype=dtype,
        device=device,
        kernels=BatchKernels(device) if cuda else TorchKernels(),
        max_model_len=min(source.config.max_position, longest + 64),
    )
    stop_ids = tuple(dict.fromkeys((*source.config.eos_ids, *tokenizer.eos_ids)))
    if not stop_ids:
        raise ConfigError(f"{model} names no end-of-text token: add eos_token_id to its config.json")
    return verifier, tokenizer, stop_ids


def choose_vocab(texts: Sequence[Text], size: int, vocab: int, always: Sequence[int]) -> tuple[Tensor, dict[str, Any]]:
    """The tokens the verifier writes most, in order of id, and what share of its text they and other sizes cover."""
    counts = np.zeros(vocab, np.int64)
    for text in texts:
        np.add.at(counts, text.ids[text.prompt :], 1)
    rank = counts.copy()
    rank[list(always)] = counts.max() + 1  # always among them, but they cover no more than what is written
    ranked = np.argsort(-rank, kind="stable")
    share = np.cumsum(counts[ranked]) / max(1, counts.sum())
    size = min(size, vocab)
    sizes = sorted({n for n in (1024, 2048, 4096, 6144, 8192, 12288, 16384, size) if n <= vocab})
    covered = {str(n): round(float(share[n - 1]), 5) for n in sizes}
    return torch.from_numpy(np.sort(ranked[:size]).astype(np.int64)), {"size": size, "covered": covered}


def machine(device: torch.device) -> str:
    """What it ran on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _until(deadline: float | None) -> Callable[[], None]:
    def check() -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise Deadline

    return check
