"""Generation and training on a GPU: graphs replay what eager steps compute, and a tiny run ends with a draft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distil.test_run import HELD_OUT, PROMPTS, RECIPE
from tests.models.checkpoints import EOS, random_ids, tiny
from verifypd.distil.generate import Generator
from verifypd.distil.run import distil, load_verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("cuda") / "verifier")


def test_graphs_replay_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = load_verifier(str(folder), torch.device("cuda"), RECIPE)
    prompts, temperatures = [random_ids(n, seed=n) for n in (3, 40, 17, 5)], [0.0, 0.0, 0.8, 1.0]
    generator = Generator(model, 4, 128, [EOS])
    replayed = generator.run(prompts, temperatures, 60, seed=3)
    assert generator.run(prompts, temperatures, 60, seed=3) == replayed  # captured before: the same noise
    monkeypatch.setattr(Generator, "_step", Generator._advance)
    assert Generator(model, 4, 128, [EOS]).run(prompts, temperatures, 60, seed=3)[:2] == replayed[:2]


def test_a_run_on_a_gpu(folder: Path, tmp_path: Path) -> None:
    made = distil(str(folder), tmp_path, RECIPE, prompts=PROMPTS, held_out=HELD_OUT, device="cuda")
    assert made["finished"] and (tmp_path / "draft" / "model.safetensors").is_file()
