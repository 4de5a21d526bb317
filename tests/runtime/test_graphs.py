"""Padded passes: the shapes, and that real rows come out as without padding. On a GPU the same through CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from verifypd import LLM, SamplingParams
from verifypd.batch import VerifyBatch, VerifySpan
from verifypd.errors import ConfigError
from verifypd.runtime.graphs import PassInputs, bucket, padding, pass_key

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 2, 3, 5, 9, 12, 13, 17, 24, 25, 33, 49, 100, 129)] == [
        1, 2, 4, 8, 12, 12, 16, 24, 24, 32, 48, 64, 128, 192,
    ]  # fmt: skip
    assert all(bucket(bucket(n)) == bucket(n) >= n for n in range(1, 600))
    assert len({bucket(n) for n in range(1, 1025)}) < 20  # each is a graph


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9).flatmap(lambda w: st.tuples(st.just(w), st.lists(st.integers(1, w), min_size=1, max_size=70))))
def test_padding_fills_the_pass(case: tuple[int, list[int]]) -> None:
    widest, rows = case
    key = pass_key(rows, widest)
    void = padding(rows, key)
    assert len(rows) + len(void) == key.spans
    assert sum(rows) + sum(void) == key.rows
    assert all(0 <= count <= widest for count in void)
    assert key.rows < 2 * sum(rows) + 1 and key.spans <= 2 * (len(rows) + -(-key.rows // widest))


def test_inputs() -> None:
    key = pass_key([3, 1, 2, 3], 3)
    assert (key.rows, key.spans) == (12, 8)
    inputs = PassInputs(key, torch.device("cpu"))
    inputs.fill([3, 1, 2, 3], [5, 0, 2, 7], [1, 1, 1, 1], drafted=True)
    assert inputs.own.tolist() == [5, 0, 2, 7, -1, -1, -1, -1]
    assert inputs.offsets.tolist() == [0, 3, 4, 6, 9, 12, 12, 12, 12]
    assert inputs.depth.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 1, 2]
    layout = inputs.layout(torch.full((8,), 40), torch.ones(8, 4, dtype=torch.int32), 16, 64)
    assert (layout.starts[:4] == 39).all() and (layout.starts[4:] < 0).all()
    assert (layout.write_index[9:] == 0).all()  # the null block
    assert (layout.write_index[:9] > 0).all()
    with pytest.raises(ValueError, match="does not fit"):
        padding([3, 3], pass_key([1], 3))


OPTIONS: dict[str, Any] = {
    "arch": "unified",
    "controller": "fixed",
    "max_draft": 3,
    "measure_costs": False,
    "dtype": "float32",
    "kernels": "torch",
    "max_model_len": 60,
    "kv_memory": "8MB",
    "batch_size": 4,
    "device": DEVICE,
}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 7], [30, 31, 32, 33, 34]]


def generate(draft: Path, verifier: Path, params: list[SamplingParams], **changes: Any) -> tuple[Any, set[str]]:
    with LLM(str(verifier), draft=str(draft), **{**OPTIONS, **changes}) as llm:
        texts = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        graphs = llm.engine.verify.graphs
        llm.engine.drain()
        llm.engine.check()
        return texts, set() if graphs is None else {key[1] for key in graphs.graphs.keys}


def test_texts_do_not_feel_the_padding(tmp_path: Path) -> None:
    """Greedy, drawn and coupled requests side by side, against torch without any of it."""
    verifier = tiny("llama", tmp_path / "verifier")
    draft = noisy_copy(verifier, tmp_path / "draft", 0.1)
    params = [
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, acceptance="rejection", max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=5, ignore_eos=True),
    ]
    expected, none = generate(draft, verifier, params)
    found, kinds = generate(draft, verifier, params, attention="triton", sampler="triton", graphs=True)
    assert found == expected
    assert (none, kinds) == (set(), {"verify", "draft"})


def test_padding_leaves_the_caches_of_others_alone(tmp_path: Path) -> None:
    verifier = tiny("llama", tmp_path / "verifier")
    settings = {**OPTIONS, "attention": "triton", "sampler": "triton", "graphs": True}
    with LLM(str(verifier), draft=None, **settings) as llm:
        lane = llm.engine.verify
        runner, slots = lane.runner, lane.slots
        slots.tokens.random_(3, 300)
        slots.lengths.copy_(torch.arange(len(slots.lengths)) * 5 + 6)
        runner.tables.data.copy_(torch.arange(1, 1 + runner.tables.data.numel()).view_as(runner.tables.data) % 60)
        generator = torch.Generator().manual_seed(0)
        runner.cache.data.copy_(torch.randn(runner.cache.data.shape, generator=generator))
        spans = [VerifySpan(1, 2, 1, None, True, 20), VerifySpan(2, 1, 0, None, True, 30)]
        before = runner.cache.data.clone()
        padded = lane.graphs.verify(spans).clone()
        after = runner.cache.data.clone()
        runner.cache.data.copy_(before)
        lane.graphs = None
        plain = lane.forward(VerifyBatch(tuple(spans)))
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[:, :, 1:], runner.cache.data[:, :, 1:], rtol=1e-5, atol=1e-5)
        changed = (after != before).flatten(3).any(-1).any(0).any(0)  # blocks
        assert int(changed[1:].sum()) <= 3  # of three rows; the null block may change


def test_what_it_needs(tmp_path: Path) -> None:
    verifier = tiny("llama", tmp_path / "verifier")
    with pytest.raises(ConfigError, match="--graphs needs --attention triton"):
        LLM(str(verifier), draft=None, **{**OPTIONS, "attention": "torch", "graphs": True})
    with pytest.raises(ConfigError, match="--graphs runs lanes in line"):
        LLM(str(verifier), draft=None, **{**OPTIONS, "placement": "stream", "graphs": True})
