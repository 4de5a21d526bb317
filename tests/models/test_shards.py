"""A model divided among ranks gives the logits of the whole: in two processes for every family, in threads for more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import FAMILIES, PagedRun, load, random_ids, tiny
from tests.models.sharded import Divided, in_process, in_threads, job_of, serve_ranks, source_of
from tests.models.test_gguf import load_gguf, write_gguf
from verifypd.attention.choose import available_backends
from verifypd.errors import ConfigError
from verifypd.kernels.choose import select
from verifypd.kernels.weights import Int8Weight, Quantization
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.gguf import gguf_config
from verifypd.models.shards import Shard
from verifypd.parallel.group import Group
from verifypd.parallel.worker import load as load_rank

pytestmark = pytest.mark.xdist_group("shards")  # one second rank for all

Checkpoint = Callable[[str], Path]
BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def second() -> Iterator[Connection]:
    """A line to a process that is the second rank of one model after another."""
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=serve_ranks, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.send(None)
    process.join(30)
    assert process.exitcode == 0


def passes(run: PagedRun) -> torch.Tensor:
    """Prompts, a prompt in chunks, then single tokens and drafts of several slots in one pass."""
    texts = [random_ids(n, seed=n) for n in (20, 41, 33)]
    done = run.logits([(0, 0, texts[0][:8]), (1, 0, texts[1][:40])])
    chunk = run.logits([(2, 0, texts[2][:17])])
    more = run.logits([(2, 17, texts[2][17:28]), (0, 8, texts[0][8:19])])
    mixed = run.logits([(2, 28, texts[2][28:]), (0, 19, texts[0][19:]), (1, 40, texts[1][40:])])
    return torch.cat([done, chunk, more, mixed])


def same(divided: Divided, whole: PagedRun, slack: float = 1e-4) -> None:
    ours, theirs = passes(divided), passes(whole)
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= slack


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_give_the_logits_of_one(
    family: str, checkpoint: Checkpoint, second: Connection, tmp_path: Path
) -> None:
    folder = checkpoint(family)
    with in_process(source_of(folder), second, tmp_path) as divided:
        same(divided, PagedRun(load(folder)))


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])
def test_more_ranks_than_key_heads_share_them(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint(family)
    with in_threads(source_of(folder), 4, tmp_path) as divided:
        assert (divided.model.config.heads, divided.model.config.kv_heads) == (1, 1)
        same(divided, PagedRun(load(folder)))


def test_biases_of_sums_are_added_once(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path / "model", **BIASES)
    with in_threads(source_of(folder), 2, tmp_path) as divided:
        same(divided, PagedRun(load(folder)))


def test_int8_shards_hold_the_numbers_of_the_whole(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen2")
    whole = load(folder, quantization="int8")
    with in_threads(source_of(folder), 2, tmp_path, quantization="int8") as divided:
        down, all_of_it = divided.model.layers[0].down, whole.layers[0].down
        assert isinstance(down, Int8Weight) and isinstance(all_of_it, Int8Weight)
        assert torch.equal(down.values, all_of_it.values[:, : down.shape[1]])
        assert torch.equal(down.scale, all_of_it.scale)
        same(divided, PagedRun(whole))


def test_shards_of_a_gguf_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", "llama")
    source = ModelSource("gguf", gguf_config(path), gguf=path)
    with in_threads(source, 2, tmp_path) as divided:
        same(divided, PagedRun(load_gguf(path)))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_in_the_form_of_the_device(
    checkpoint: Checkpoint, tmp_path: Path, quantization: Quantization | None
) -> None:
    """16-bit and int8 weights, packed where this processor's kernels pack them; those multiply in 16 bits, too."""
    folder, kernels = checkpoint("llama"), select("cpu")
    form: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": quantization}
    whole = load(folder, kernels=kernels, **form)
    with in_threads(source_of(folder), 2, tmp_path, kernels=kernels.name, **form) as divided:
        same(divided, PagedRun(whole), 0.05)


@pytest.mark.skipif("native" not in available_backends("cpu"), reason="no C compiler")
def test_rows_of_two_ranks_do_not_feel_their_neighbours(checkpoint: Checkpoint, tmp_path: Path) -> None:
    native = {"kernels": "native", "attention": "native", "batch_invariant": True, "dtype": torch.bfloat16}
    ids = random_ids(30)
    with in_threads(source_of(checkpoint("llama")), 2, tmp_path, **native) as divided:
        alone = divided.logits([(0, 0, ids[:5])])
        beside = divided.logits([(1, 0, ids), (0, 0, ids[:5]), (2, 0, ids[7:])])
    assert torch.equal(beside[30:35], alone)


def test_a_rank_holds_its_share_and_rank_0_the_vocabulary(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = source_of(checkpoint("llama"))
    jobs = [job_of(source, Shard(rank, 2), tmp_path) for rank in (0, 1)]
    first, other = (load_rank(job, Group(job.shard, job.device)) for job in jobs)
    whole, vocabulary = load(checkpoint("llama")), 2 * source.config.vocab_size * source.config.hidden_size * 4
    half = (whole.weight_bytes - vocabulary) / 2
    assert first.weight_bytes - vocabulary == pytest.approx(half, rel=0.01)
    assert other.weight_bytes == pytest.approx(half, rel=0.01)


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (3, {}),
        (8, {}),
        (2, {"intermediate_size": 97}),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, fields: dict[str, Any]) -> None:
    raw = {
        "model_type": "llama", "vocab_size": 384, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
    }  # fmt: skip
    config = ModelConfig.from_dict(raw | fields)
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}: tiny has .* heads.*; it can by 1"):
        Shard(0, size).config(config, "tiny")
