"""Batched generation against the model itself, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.pairs import assert_greedy
from tests.models.checkpoints import EOS, FAMILIES, load, random_ids, reference_logits, tiny
from verifypd.distil.dense import BatchKernels, read_features
from verifypd.distil.generate import Generator, draw


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_models_own(family: str, folders: Path) -> None:
    folder = tiny(family, folders / family)
    prompts = [random_ids(n, seed=n) for n in (1, 7, 15, 4)]
    generator = Generator(load(folder), 5, 40, [EOS])
    for prompt, output in zip(prompts, generator.run(prompts, [0.0] * 4, 20, seed=0), strict=True):
        assert output
        assert_greedy(folder, prompt, output, slack=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_dense_features_are_the_models_own(family: str, folders: Path) -> None:
    folder = tiny(family, folders / f"{family}-features")
    model = load(folder)
    ids = torch.tensor([random_ids(20, seed=1), random_ids(20, seed=2)])
    with torch.no_grad():
        hidden, captured = read_features(model, ids, (0, model.config.layers - 1))
        logits = model.logits(hidden.flatten(0, 1)).view(2, 20, -1)
    assert [tuple(each.shape) for each in captured] == [(2, 20, model.config.hidden_size)] * 2
    for row, own in zip(ids, logits, strict=True):
        torch.testing.assert_close(own, reference_logits(folder, row.tolist()), atol=2e-4, rtol=1e-3)


def test_sampling_follows_the_temperature_and_the_seed(folders: Path) -> None:
    folder = tiny("llama", folders / "sampled")
    generator = Generator(load(folder), 4, 40, [EOS])
    prompts = [random_ids(5)] * 4
    first = generator.run(prompts, [0.0, 0.0, 1.0, 1.0], 16, seed=1)
    assert first[0] == first[1] != first[2] != first[3]
    assert generator.run(prompts, [0.0, 0.0, 1.0, 1.0], 16, seed=1) == first
    assert generator.run(prompts, [0.0, 0.0, 1.0, 1.0], 16, seed=2)[2:] != first[2:]


def test_draw_is_the_softmax_of_the_tempered_logits() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -3.0]).repeat(20_000, 1)
    counts = draw(logits, torch.full((20_000, 1), 0.7), torch.tensor(0.0)).bincount(minlength=4) / 20_000
    torch.testing.assert_close(counts, (logits[0] / 0.7).softmax(0), atol=0.012, rtol=0)
    cut = draw(logits, torch.full((20_000, 1), 0.7), torch.tensor(0.1)).bincount(minlength=4)
    assert cut[2] == cut[3] == 0 and cut[1] > 0


def test_batch_kernels_agree_with_the_reference(folders: Path) -> None:
    folder = tiny("gemma", folders / "kernels")
    ids = torch.tensor([random_ids(12)])
    plain, batch = load(folder), load(folder, kernels=BatchKernels(torch.device("cpu")))
    with torch.no_grad():
        torch.testing.assert_close(
            read_features(batch, ids, ())[0], read_features(plain, ids, ())[0], atol=1e-5, rtol=1e-4
        )


def test_too_long_a_text_is_refused(folders: Path) -> None:
    generator = Generator(load(tiny("llama", folders / "long")), 2, 32, [EOS])
    with pytest.raises(ValueError, match="do not fit"):
        generator.run([random_ids(60)], [0.0], 8, seed=0)


def test_rows_nobody_asked_for_do_not_end_a_batch(folders: Path) -> None:
    generator = Generator(load(tiny("llama", folders / "few")), 40, 64, [EOS])
    (output,) = generator.run([random_ids(5)], [0.0], 40, seed=0)
    assert len(output) == 40 or output[-1] == EOS
