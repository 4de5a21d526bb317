"""An engine over two processes writes the texts of one, and ends with a clear error when it loses one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.arms import make, prompts, texts
from tests.models.checkpoints import PagedRun, layout_for, load
from tests.models.sharded import job_of, source_of
from verifypd import LLM, SamplingParams
from verifypd.errors import ConfigError, EngineError
from verifypd.models.shards import Shard
from verifypd.parallel import group, ranks
from verifypd.parallel.ranks import ParallelRunner, Ranks
from verifypd.parallel.worker import run
from verifypd.runtime.inputs import BlockTables
from verifypd.runtime.runner import ModelRunner

pytestmark = [pytest.mark.xdist_group("tensor-parallel"), pytest.mark.slow]

Pair = tuple[Path, Path]


def ranks_of(llm: LLM) -> Ranks:
    runner = llm.engine.verify.runner
    assert isinstance(runner, ParallelRunner)
    return runner.ranks


@pytest.fixture(scope="module")
def with_model(pair: Pair) -> Iterator[LLM]:
    with make(pair, "unified", tensor_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def with_head(pair: Pair) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "PATIENCE", 2.0)
        patch.setattr(ranks, "LAST_WORDS", 0.5)
        with make(pair, "pdv", "head", tensor_parallel_size=2) as llm:
            yield llm


def test_texts_with_a_draft_model(pair: Pair, plain: list[list[int]], with_model: LLM) -> None:
    assert texts(with_model, 6) == plain[:6]
    stats = with_model.engine.stats
    assert 0 < stats.accepted < stats.drafted


def test_memory_is_counted_by_rank(pair: Pair, with_model: LLM) -> None:
    with make(pair, "plain") as whole:
        assert 2 * with_model.budget.verifier_block_bytes == whole.budget.verifier_block_bytes
        weights = [dict(llm.budget.parts)["verifier weights"] for llm in (with_model, whole)]
    assert weights[0] < weights[1]


def test_a_head_reads_whole_states(plain: list[list[int]], with_head: LLM) -> None:
    assert texts(with_head, 3) == plain[:3]
    assert with_head.engine.stats.accepted > 0


def test_a_killed_rank_ends_the_engine(with_model: LLM) -> None:
    [process] = ranks_of(with_model).processes
    stream = with_model.stream(prompts(1)[0], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    process.kill()
    with pytest.raises(EngineError, match="rank 1 has ended with status -9, the engine cannot go on"):
        list(stream)
    with pytest.raises(EngineError, match="have ended: start it again"):
        with_model.generate([prompts(1)[0]])
    with_model.shutdown()


def test_a_stalled_rank_ends_the_engine(with_head: LLM) -> None:
    [process] = ranks_of(with_head).processes
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"the engine cannot go on .*[Tt]imed out"):
        with_head.generate([prompts(1)[0]])
    assert time.monotonic() - began < 20
    assert process.poll() is not None


def test_a_rank_ends_with_its_line_whatever_it_waits_for(pair: Pair, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    alone = Ranks(job_of(source_of(pair[0]), Shard(0, 2), tmp_path))
    alone.await_weights()
    alone.group.join = lambda folder: None  # type: ignore[method-assign]  # the other waits for this rank
    alone.begin(16)
    [process] = alone.processes
    assert process.poll() is None
    del alone  # nobody holds it any more
    assert process.poll() == 1
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("breaks", "becomes"), [(torch.OutOfMemoryError("no room"), EngineError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_what_breaks_a_pass_off_ends_all_ranks(
    breaks: BaseException, becomes: type[BaseException], pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may go on with half a pass, as an engine of one rank does that has run out of memory."""
    alone = Ranks(job_of(source_of(pair[0]), Shard(), tmp_path))
    alone.begin(1)
    paged = PagedRun(load(pair[0]))
    tables = BlockTables(4, 64, paged.cache.block_size, torch.device("cpu"))
    runner = ParallelRunner(alone, ModelRunner(paged.model, paged.attention, paged.cache, tables))
    layout = layout_for([(0, 0, 3)], paged.block_table, paged.cache.block_size)
    ids = torch.tensor([5, 6, 7])
    assert torch.equal(runner.forward(ids, layout), paged.hidden([(0, 0, [5, 6, 7])]))

    def broken(*_: object) -> None:
        raise breaks

    monkeypatch.setattr(paged.model, "through_layers", broken)
    with pytest.raises(becomes):
        runner.forward(ids, layout)
    with pytest.raises(EngineError, match="have ended: start it again"):
        runner.forward(ids, layout)


@pytest.mark.parametrize(("blocks", "model"), [(1 << 40, True), (1, False)])
def test_a_rank_that_cannot_start_says_why(blocks: int, model: bool, pair: Pair, tmp_path: Path) -> None:
    source = source_of(pair[0]) if model else replace(source_of(pair[0]), folder=tmp_path)
    ours, theirs = Pipe()
    for message in (job_of(source, Shard(1, 2), tmp_path), blocks):
        ours.send(message)
    run(theirs)
    said = [ours.recv() for _ in range(1 + model)]
    assert said[:-1] == [None] * model
    assert "allocate" in said[-1] if model else "holds no safetensors file" in said[-1]


def test_a_model_that_cannot_be_divided_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3: .*4 heads, 2 key/value heads.*by 1, 2, 4"):
        make(pair, "unified", tensor_parallel_size=3)


def test_a_group_of_devices_is_left_once() -> None:
    """NCCL itself has never run here: this is the order of what would be asked of it."""
    asked: list[str] = []
    made = group.Group(Shard(0, 2), torch.device("cuda"))
    made.leave()
    made._backend = SimpleNamespace(abort=lambda: asked.append("abort"))
    made.leave()
    made.leave()
    assert asked == ["abort"]
