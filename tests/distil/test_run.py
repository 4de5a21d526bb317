"""`verifypd distil` from end to end on a tiny verifier: text, training, a folder; twice the same, and after a stop."""

from __future__ import annotations

import json
import shutil
import stat
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from verifypd import progress
from verifypd.cli import main
from verifypd.distil import run as stages
from verifypd.distil import text, train
from verifypd.distil.plot import draw_curve
from verifypd.distil.prompts import Prompt
from verifypd.distil.recipe import LOSSES, TINY
from verifypd.engine import sizes
from verifypd.errors import ConfigError, MemoryBudgetError
from verifypd.models.base import Model

pytestmark = pytest.mark.xdist_group("distil-run")  # one whole run for all

TEXT = {"self_prompts": 8, "responses": 24, "max_prompt": 96, "max_new": 12, "generate_batch": 8, "validation": 4}
RECIPE = replace(TINY, **TEXT, losses=LOSSES, pilot_steps=2, steps=4, batch_tokens=512, warmup=2)
PROMPTS = [Prompt("chat", f"Tell me about the number {n}.") for n in range(12)]
HELD_OUT = [Prompt("chat", "What is rain?"), Prompt("story", "Write about the sea.")]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("distil") / "verifier")


def make(verifier: Path, out: Path, **settings: Any) -> dict[str, Any]:
    recipe = replace(RECIPE, **settings.pop("recipe", {}))
    return stages.distil(str(verifier), out, recipe, prompts=PROMPTS, held_out=HELD_OUT, device="cpu", **settings)


@pytest.fixture(scope="module")
def whole(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    assert make(verifier, out)["finished"]
    return out


@pytest.fixture(autouse=True)
def undrawn(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run draws its curve, the others need not: a picture takes longer than their training."""
    monkeypatch.setattr(stages, "draw_curve", lambda curve, path: True)


def test_a_draft_comes_out(whole: Path) -> None:
    made = json.loads((whole / "draft" / "distil.json").read_text())
    assert made["steps"] == 4 and made["loss"] in made["pilots"] and len(made["pilots"]) == 3
    assert set(made["evaluation"]) == {"0.0", "0.8"}
    assert set(made["evaluation"]["0.0"]) == {"all", "chat", "story"}
    weights = load_file(whole / "draft" / "model.safetensors")
    assert (
        weights["vocab_map"].tolist() == sorted(set(weights["vocab_map"].tolist())) and len(weights["vocab_map"]) == 64
    )
    assert weights["fc.weight"].shape == (64, 128) and weights["fc.weight"].dtype == torch.bfloat16
    config = json.loads((whole / "draft" / "config.json").read_text())
    assert config["feature_layers"] == [0, 1] and config["draft_vocab_size"] == 64
    assert (whole / "curve.png").stat().st_size > 1000


def test_whoever_reads_the_folder_reads_its_files(whole: Path) -> None:
    """A server may run as somebody else."""
    assert len({stat.S_IMODE(file.stat().st_mode) for file in (whole / "draft").iterdir()}) == 1


def test_a_run_without_a_measurement_has_a_picture_too(tmp_path: Path) -> None:
    assert draw_curve([], tmp_path / "curve.png") and (tmp_path / "curve.png").stat().st_size > 1000


def test_the_same_seed_gives_the_same_draft(verifier: Path, whole: Path, tmp_path: Path) -> None:
    make(verifier, tmp_path)
    first, second = (load_file(out / "draft" / "model.safetensors") for out in (whole, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_stopped_run_goes_on(verifier: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped once while text is written and once in training, then run to the end: the draft of an unbroken run."""
    calls = {"left": 5}

    def until(deadline: float | None) -> Any:
        def check() -> None:
            calls["left"] -= 1
            if calls["left"] < 0:
                raise text.Deadline

        return check

    monkeypatch.setattr(stages, "_until", until)
    assert make(verifier, tmp_path) == {"finished": False, "stage": "text"}
    calls["left"] = 10
    stopped = make(verifier, tmp_path)
    assert not stopped["finished"]
    calls["left"] = 1000
    assert make(verifier, tmp_path)["finished"]
    first, second = (load_file(out / "draft" / "model.safetensors") for out in (whole, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_steps_are_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half a second a step and one a look, 100 steps and the time that is left give the number of all."""
    trainer = SimpleNamespace(step=0, recipe=RECIPE, save=None, fitted=None, looks=[])

    def go(until: int, keep: object) -> None:
        trainer.step = until
        trainer.looks.append(1.0)

    trainer._train = go
    clock = SimpleNamespace(monotonic=lambda: 0.5 * trainer.step + sum(trainer.looks))
    monkeypatch.setattr(train, "time", clock)
    train.Trainer._fit(trainer, 152.0)  # type: ignore[arg-type]
    assert trainer.step == train.WARM + train.PACED == 100
    assert trainer.fitted == 100 + int((100 * train.FILLED - train.LOOKS) / 0.5)


def test_a_fitted_run_that_is_done_does_no_more_steps(
    verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "WARM", 1)
    monkeypatch.setattr(train, "PACED", 1)
    monkeypatch.setattr(train, "FILLED", 0.0)  # one step more
    first = make(verifier, tmp_path, fit_steps=True, time_limit=1000.0)
    made = load_file(tmp_path / "draft" / "model.safetensors")
    again = make(verifier, tmp_path, fit_steps=True, time_limit=1000.0)
    assert first["finished"] and first["recipe"]["steps"] == again["recipe"]["steps"]
    assert all(torch.equal(x, made[name]) for name, x in load_file(tmp_path / "draft" / "model.safetensors").items())


def test_fitted_steps_need_a_time_limit(verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fit-steps needs --time-limit"):
        make(verifier, tmp_path, fit_steps=True)


def test_a_stop_between_pilots_loses_none(verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that may do one step at a time comes to the same draft: pilots go on where they were, scores are kept."""
    out, done = tmp_path / "out", tmp_path / "done"
    settings = {"pilot_steps": 2, "steps": 3, "losses": ("kl", "kl+tv")}
    expected = make(verifier, done, recipe=settings)
    left = [100]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise text.Deadline

    monkeypatch.setattr(stages, "_until", lambda deadline: check)
    found = make(verifier, out, recipe=settings)
    (out / "work" / "checkpoint.pt").unlink()  # as if it had been stopped before its first step
    finished = []
    for _ in range(5):
        left[0] = 1
        found = make(verifier, out, recipe=settings)
        finished.append(found["finished"])
    assert finished == [False] * 4 + [True], "a step at a time"
    assert found["pilots"] == expected["pilots"] and found["loss"] == expected["loss"]
    first, second = (load_file(folder / "draft" / "model.safetensors") for folder in (out, done))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_checkpoints_are_written_along_the_way(
    verifier: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed without a word between two steps: the next run goes on from the last checkpoint."""
    monkeypatch.setattr(train, "SAVE", 2)
    monkeypatch.setattr(train.Trainer, "_train", train.Trainer._steps)  # nothing is kept on the way out
    real, steps = train.Trainer.train_step, [0]

    def step(self: Any, batch: Any) -> Any:
        steps[0] += 1
        if steps[0] == 4:
            raise KeyboardInterrupt
        return real(self, batch)

    monkeypatch.setattr(train.Trainer, "train_step", step)
    with pytest.raises(KeyboardInterrupt):
        make(verifier, tmp_path, recipe={"losses": ("kl",)})
    assert torch.load(tmp_path / "work" / "checkpoint.pt", weights_only=True)["step"] == 2
    assert make(verifier, tmp_path, recipe={"losses": ("kl",)})["steps"] == 4 and steps[0] == 6


@pytest.mark.parametrize("what", ["claim", "text", "checkpoint"])
def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(
    verifier: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Any, *_: Any, **__: Any) -> None:
        if what == "claim":
            path.write_text("{")
        raise RuntimeError("enforce fail") if what == "checkpoint" else OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as now:
        module, name = {"claim": (text, "write_json"), "text": (np, "savez"), "checkpoint": (torch, "save")}[what]
        now.setattr(module, name, full)
        said = r"cannot be written \((No space|is the disk full\?).*make room, then run the same command again"
        with pytest.raises(ConfigError, match=said):
            make(verifier, tmp_path, recipe={"losses": ("kl",)})
    assert make(verifier, tmp_path, recipe={"losses": ("kl",)})["finished"]


def test_a_checkpoint_of_other_settings_is_refused(verifier: Path, whole: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.pt was made with other settings \(--depth, --learning-rate\)"):
        make(verifier, whole, recipe={"depth": 3, "learning_rate": 2e-3})


def test_a_run_may_become_longer(verifier: Path, tmp_path: Path) -> None:
    made = [make(verifier, tmp_path, recipe={"losses": ("kl",), "steps": steps}) for steps in (2, 3)]
    assert [each["steps"] for each in made] == [2, 3]


@pytest.mark.parametrize("what", ["max_new", "verifier", "prompts", "held_out"])
def test_text_made_otherwise_is_not_mixed_in(verifier: Path, whole: Path, tmp_path: Path, what: str) -> None:
    model, recipe, given, held_out = verifier, RECIPE, PROMPTS, HELD_OUT
    if what == "max_new":
        recipe = replace(RECIPE, max_new=11)
    elif what == "verifier":
        model = noisy_copy(verifier, tmp_path / "other", 0.1)
    elif what == "prompts":
        given = PROMPTS[1:]
    else:
        held_out = [*HELD_OUT, PROMPTS[0]]  # what it was trained on would be what it is judged by
    with pytest.raises(ConfigError, match=f"\\({what} differ\\)"):
        stages.distil(str(model), whole, recipe, prompts=given, held_out=held_out, device="cpu")


def test_the_same_verifier_by_another_path_goes_on(verifier: Path, whole: Path, tmp_path: Path) -> None:
    assert make(noisy_copy(verifier, tmp_path / "copy", 0.0), whole)["finished"]


def test_nothing_held_out_is_nothing_evaluated(verifier: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, losses=("kl",), steps=1, self_prompts=0)
    made = stages.distil(str(verifier), tmp_path, recipe, prompts=PROMPTS, held_out=[], device="cpu")
    assert made["finished"] and made["evaluation"] == {}


def test_texts_the_verifier_cannot_read_are_refused(verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lower --max-prompt or --max-new"):
        make(verifier, tmp_path, recipe={"max_prompt": 250, "max_new": 50, "window": 400})


@pytest.mark.parametrize(("layers", "told"), [("-1,0", "each of them once"), ("0,99", "has no layer 99")])
def test_layers_there_are_not_are_refused_before_any_text(
    layers: str, told: str, verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["distil", "--tiny", "--model", str(verifier), "--out", str(tmp_path), f"--feature-layers={layers}"]
    assert main(command) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "work").exists()


def test_tokens_that_are_always_in_cover_only_what_is_written() -> None:
    written = [text.Text(np.array([1, 1, 1, 2, 2, 3], np.int32), 0, 0.0)]
    ids, coverage = stages.choose_vocab(written, 2, 8, always=[7])
    assert ids.tolist() == [1, 7] and coverage["covered"]["2"] == 0.5


@pytest.mark.parametrize(("share", "copies"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 3), (0.7, 7)])
def test_few_given_prompts_are_answered_often(share: float, copies: int) -> None:
    prompts = [text.Text(np.array([n]), 1, 0.0, "given" if n < 2 else "self-written") for n in range(8)]
    found = [ids[0] for ids in text.repeated(prompts, share)]
    assert sorted(found) == sorted([0, 1] * copies + list(range(2, 8)))
    assert text.repeated(prompts[2:], share) == [[n] for n in range(2, 8)]


def test_training_learns(verifier: Path, tmp_path: Path) -> None:
    made = make(verifier, tmp_path, recipe={"steps": 24, "losses": ("kl",), "warmup": 6, "responses": 64})
    first, last = (json.loads((tmp_path / "curve.json").read_text())["curve"][i]["validation"] for i in (0, -1))
    assert last["0.8"]["all"]["alpha"][0] > first["0.8"]["all"]["alpha"][0] + 0.05
    assert made["evaluation"]["0.8"]["all"]["alpha"][0] > 0.25


def test_training_begins_with_a_given_draft(verifier: Path, whole: Path, tmp_path: Path) -> None:
    first, draft = load_file(whole / "draft" / "model.safetensors"), str(whole / "draft")
    still = {"start": draft, "learning_rate": 0.0, "losses": ("kl",), "vocab": 48}
    make(verifier, tmp_path / "still", recipe=still)
    second = load_file(tmp_path / "still" / "draft" / "model.safetensors")
    assert len(second.pop("vocab_map")) == 48 and len(first.pop("vocab_map")) == 64
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    made = json.loads((tmp_path / "still" / "draft" / "distil.json").read_text())
    assert made["start"] == json.loads((whole / "draft" / "distil.json").read_text())


def test_a_draft_of_another_shape_is_no_start(verifier: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another shape: mlp 96, not 80"):
        make(verifier, tmp_path, recipe={"start": str(whole / "draft"), "mlp_size": 80})
    assert not (tmp_path / "work").exists()
    with pytest.raises(ConfigError, match="no draft that can be read"):
        make(verifier, tmp_path, recipe={"start": str(verifier / "nowhere")})
    broken = tmp_path / "broken"
    shutil.copytree(whole / "draft", broken)
    (broken / "distil.json").write_text("{")
    with pytest.raises(ConfigError, match=r"distil\.json is damaged"):
        make(verifier, tmp_path, recipe={"start": str(broken)})
    weights = load_file(whole / "draft" / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ConfigError, match=r"fc\.weight"):
        make(verifier, tmp_path, recipe={"start": str(broken)})


def test_the_command_makes_a_draft(verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"How far is {n} miles?\n" for n in range(12)))
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"kind": "question", "text": "How far is the sun?"}\n')
    settings = {
        "model": verifier,
        "out": tmp_path / "out",
        "device": "cpu",
        "prompts": prompts,
        "held-out": held_out,
        "self-prompts": 0,
        "responses": 16,
        "max-new": 12,
        "generate-batch": 8,
        "steps": 3,
        "losses": "kl",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    assert main(["distil", "--tiny", *flags]) == 0
    assert "T=0.0 question" in capsys.readouterr().out
    assert (tmp_path / "out" / "draft" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--losses", "mse", "'mse' is not known"),
        ("--steps", "many", "not of the kind"),
        ("--max-new", "4000", "raise --window"),
        ("--pilot-steps", "-1", "--pilot-steps"),
        ("--batch-tokens", "0", "--batch-tokens is 0"),
        ("--temperatures", "-1", "--temperatures"),
        ("--temperatures", "nan", "--temperatures"),
        ("--learning-rate", "nan", "--learning-rate is nan"),
        ("--learning-rate", "-1", "--learning-rate is -1.0"),
        ("--mlp-size", "0", "--mlp-size is 0"),
        ("--feature-layers", "0,0", "--feature-layers"),
    ],
)
def test_bad_settings_are_refused(
    flag: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distil", "--out", str(tmp_path), flag, value]) == 2
    assert message in capsys.readouterr().err


# -- the tiny recipe, and what a log is told ---------------------------------------------------------------------------


def test_the_tiny_recipe_takes_seconds(
    verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the command, every stage: few enough rows for a verifier of 135 M weights, at 0.3 GFLOP each, on two
    cores. A log hears of every stage."""
    rows = [0]
    through = Model.through_layers

    def counted(self: Model, residual: torch.Tensor, *rest: Any) -> Any:
        rows[0] += len(residual)
        return through(self, residual, *rest)

    monkeypatch.setattr(Model, "through_layers", counted)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert main(["distil", "--model", str(verifier), "--out", str(tmp_path), "--tiny", "--device", "cpu"]) == 0
    assert (tmp_path / "draft" / "model.safetensors").exists()
    assert 500 < rows[0] < 4000
    told = [record.getMessage() for record in caplog.records if record.name == "verifypd.progress"]
    stages = ("evaluation answers: 2 of 2 batches", "validation answers: 2 of 2", "answers: 1 of 1 shards")
    for stage in (*stages, "training, kl: 1 of 1 steps", "training, kl+top: 1 of 1 steps", "evaluation: "):
        assert any(line.startswith(stage) for line in told), (stage, told)


def test_a_verifier_that_does_not_fit_is_refused_before_it_is_loaded(
    verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda: 10_000)
    monkeypatch.setattr(stages, "load_model", None)
    with pytest.raises(MemoryBudgetError, match="for its weights and cpu has"):
        make(verifier, tmp_path)
