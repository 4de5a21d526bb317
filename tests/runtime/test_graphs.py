"""Padded passes: real rows come out as without padding. On a GPU the same through CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.engine.heads import eagle3_for, head_for
from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from verifypd import LLM, SamplingParams
from verifypd.batch import DraftBatch, DraftSpan, VerifyBatch, VerifySpan
from verifypd.buckets import chunk_bucket, span_bucket
from verifypd.errors import ConfigError
from verifypd.runtime.passes import reachable
from verifypd.sampling.case import Spans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    "graphs": "off",
}
LAYERS = 2  # more of them are more of the same to the interpreter, in which nearly all of the time goes
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 7], [30, 31, 32, 33, 34]]


def heard(engine: Any) -> dict[tuple[int, int], list[int]]:
    """What is drafted from now on, by request and length."""
    said: dict[tuple[int, int], list[int]] = {}
    drafter = next(iter(engine.decode.drafters.values()))
    launch = drafter.launch

    def note(batch: Any) -> None:
        launch(batch)
        for span in batch.spans:
            if span.drafts:
                at = engine.running[span.slot].order, int(engine.slots.lengths[span.slot])
                said[at] = engine.slots.drafts[span.slot, : span.drafts].tolist()

    drafter.launch = note
    return said


def same_drafts(one: dict[tuple[int, int], list[int]], other: dict[tuple[int, int], list[int]]) -> bool:
    """Whether both proposed the same wherever both drafted, as far as both did: on a GPU a verdict may come a step
    later, and drafts with it at other places."""
    shared = one.keys() & other.keys()
    return len(shared) >= 3 and all(a == b for at in shared for a, b in zip(one[at], other[at], strict=False))


def generate(draft: Path, verifier: Path, params: list[SamplingParams], **changes: Any) -> tuple[Any, set[str]]:
    """Texts and, last, all drafts; and the kinds of what was replayed."""
    with LLM(str(verifier), draft=str(draft), **{**OPTIONS, **changes}) as llm:
        said = heard(llm.engine)
        texts: Any = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        texts.append(said)
        padded = llm.engine.verify.padded
        llm.engine.drain()
        llm.engine.check()
        return texts, set() if padded is None else {key[1] for key in padded.graphs.keys}


@pytest.mark.slow
def test_texts_do_not_feel_the_padding(tmp_path: Path) -> None:
    """Greedy, drawn and coupled requests side by side, against torch without any of it."""
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=LAYERS)
    draft = noisy_copy(verifier, tmp_path / "draft", 0.1)
    params = [
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, acceptance="rejection", max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=5, ignore_eos=True),
    ]
    expected, none = generate(draft, verifier, params)
    found, kinds = generate(draft, verifier, params, attention="triton", sampler="triton", graphs="lazy")
    assert found[:-1] == expected[:-1]
    assert same_drafts(found[-1], expected[-1])
    assert (none, kinds) == (set(), {"verify", "catch up", "draft"})


SHAPED = [
    {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "logit_bias": {7: 4.0, 9: -3.0},
        "allowed_token_ids": [*range(3, 300)],
    },
    {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.7, "presence_penalty": 0.3, "min_tokens": 4},
    {"temperature": 0.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["model", "head"])
def test_drafts_of_requests_with_penalties(draft: str, tmp_path: Path) -> None:
    """Drafted by loops of a second kind, as they are without padding; who asks for nothing feels nothing."""
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=LAYERS)
    small = head_for(verifier, tmp_path / "head", taught=False)
    small = small if draft == "head" else noisy_copy(verifier, tmp_path / "draft", 0.05)
    params = [SamplingParams(**each, max_tokens=4, ignore_eos=True) for each in SHAPED]
    prompts = [[*ids, 7] for ids in PROMPTS]
    said = []
    for changes in ({"sampler": "torch"}, {"attention": "triton", "sampler": "triton", "graphs": "lazy"}):
        with LLM(str(verifier), draft=str(small), **{**OPTIONS, **changes}) as llm:
            drafts = heard(llm.engine)
            texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            said.append((drafts, texts))
            padded = llm.engine.verify.padded
            assert padded is None or "shaped draft" in {key[1] for key in padded.graphs.keys}
    (drafts, texts), (other_drafts, other_texts) = said
    assert texts == other_texts and same_drafts(drafts, other_drafts)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "late"), [("ours", False), ("eagle3", True)])
def test_heads_do_not_feel_the_padding(kind: str, late: bool, tmp_path: Path) -> None:
    """Verify passes that a head reads, prompts read behind them, and draft loops with features: the same drafts."""
    layers = LAYERS if kind == "ours" else 3  # EAGLE-3 reads three
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=layers)
    head = (head_for if kind == "ours" else eagle3_for)(verifier, tmp_path / "head", taught=False)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, acceptance="rejection", max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=4, ignore_eos=True),
    ]
    expected, _ = generate(head, verifier, params, late_tickets=late)
    padded: dict[str, Any] = {"attention": "triton", "sampler": "triton", "graphs": "lazy", "late_tickets": late}
    found, kinds = generate(head, verifier, params, **padded)
    assert found[:-1] == expected[:-1] and same_drafts(found[-1], expected[-1])
    assert kinds == {"verify", "catch up", "draft"}


@pytest.mark.slow
def test_passes_are_the_same_while_nobody_drafts(tmp_path: Path) -> None:
    """Who stops drafting finds the passes captured: there are none that keep no features."""
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=LAYERS)
    head = head_for(verifier, tmp_path / "head", taught=False)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    settings = {**OPTIONS, "attention": "triton", "sampler": "triton", "graphs": "lazy"}
    with LLM(str(verifier), draft=str(head), **settings) as llm:
        kept = llm.engine.verify.reader.data
        drafting = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        llm.engine.switch("plain")
        kept.zero_()
        plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        assert not llm.engine.verify.keeps and plain == drafting
        assert kept.any(1).sum() >= len(PROMPTS), "the passes are those that keep features"


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [False, True])
def test_void_rows_keep_no_feature(chunks: bool, tmp_path: Path) -> None:
    """They name slot 0 and position 0: a block there may be shared, and its features are somebody's."""
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=LAYERS)
    head = head_for(verifier, tmp_path / "head", taught=False)
    settings = {**OPTIONS, "attention": "triton", "sampler": "triton", "graphs": "lazy", "kernels": "triton"}
    with LLM(str(verifier), draft=str(head), **settings) as llm:
        lane = llm.engine.verify
        reader = lane.reader
        slots, tables = lane.slots, llm.engine.decode.drafters["head"].runner.tables
        slots.tokens.random_(3, 300)
        slots.lengths.copy_(torch.arange(len(slots.lengths)) * 5 + 6)
        for each in (lane.runner.tables, tables):
            each.data.copy_(torch.arange(1, 1 + each.data.numel()).view_as(each.data) % 60)
        reader.data.fill_(7.0)
        spans = [VerifySpan(1, 2, 1, None, True, 20), VerifySpan(2, 1, 0, None, True, 30)]
        spans += [VerifySpan(3, 4, 0, 9, False, 13)] if chunks else []
        lane.padded.run(spans)
        written = {int(place) for place in (reader.data != 7.0).any(1).nonzero()[:, 0]}
        where = [(1, 10), (1, 11), (2, 15)] + [(3, 9 + j) for j in range(4)] * chunks
        size = tables.block_size
        expected = {int(tables.data[slot, at // size]) * size + at % size for slot, at in where}
        assert {place for place in written if place >= size} == expected


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [False, True])
def test_padding_leaves_the_caches_of_others_alone(chunks: bool, tmp_path: Path) -> None:
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=LAYERS)
    settings = {**OPTIONS, "attention": "triton", "sampler": "triton", "graphs": "lazy"}
    with LLM(str(verifier), draft=None, **settings) as llm:
        lane = llm.engine.verify
        runner, slots = lane.runner, lane.slots
        slots.tokens.random_(3, 300)
        slots.lengths.copy_(torch.arange(len(slots.lengths)) * 5 + 6)
        runner.tables.data.copy_(torch.arange(1, 1 + runner.tables.data.numel()).view_as(runner.tables.data) % 60)
        generator = torch.Generator().manual_seed(0)
        runner.cache.data.copy_(torch.randn(runner.cache.data.shape, generator=generator))
        spans = [VerifySpan(1, 2, 1, None, True, 20), VerifySpan(2, 1, 0, None, True, 30)]
        spans += [VerifySpan(3, 4, 0, 9, False, 13), VerifySpan(0, 2, 0, 0, True, 2)] if chunks else []
        before = runner.cache.data.clone()
        padded = lane.padded.run(spans).clone()
        judged, depth = lane.padded.judged(spans), [span.drafts for span in spans]
        assert (judged is None) == chunks and lane.padded.judged(list(spans)) is None
        if judged is not None:
            known = Spans.of([span.slot for span in spans], depth, slots.device)
            assert (judged.slot_ids, judged.depth) == (known.slot_ids, known.depth)
            for name in ("slots", "drafted", "row_span", "row_depth", "first_row"):
                assert torch.equal(getattr(judged, name), getattr(known, name)), name
        after = runner.cache.data.clone()
        runner.cache.data.copy_(before)
        lane.padded = None
        plain = lane.forward(VerifyBatch(tuple(spans)))
        torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[:, :, 1:], runner.cache.data[:, :, 1:], rtol=1e-5, atol=1e-5)
        changed = (after != before).flatten(3).any(-1).any(0).any(0)  # blocks
        assert 0 < int(changed[1:].sum()) <= 3 + 3 * chunks  # of three rows and two chunks; the null block may change


def test_what_it_needs(tmp_path: Path) -> None:
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=LAYERS)
    with pytest.raises(ConfigError, match="--graphs needs --attention triton"):
        LLM(str(verifier), draft=None, **{**OPTIONS, "attention": "torch", "graphs": "lazy"})
    with pytest.raises(ConfigError, match="--graphs lazy runs lanes in line"):
        LLM(str(verifier), draft=None, **{**OPTIONS, "placement": "stream", "graphs": "lazy"})


def test_catching_up_takes_passes_that_were_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are divided among them, however far behind they are; one that fits none is left. Without anybody who drafts
    there is no draft loop."""
    verifier = tiny("llama", tmp_path / "verifier", num_hidden_layers=LAYERS)
    draft = noisy_copy(verifier, tmp_path / "draft", 0.1)
    settings = {**OPTIONS, "attention": "triton", "sampler": "triton", "graphs": "lazy", "prefill_chunk": 64}
    with LLM(str(verifier), draft=str(draft), **settings, draft_chunk=20) as llm:
        drafter: Any = llm.engine.drafter
        loops, passes, drafted = drafter.loops, [], []
        monkeypatch.setattr(loops, "_catch_up_with", lambda spans: passes.append([span.rows for span in spans]))
        monkeypatch.setattr(loops, "draft", drafted.append)
        rows = [60, 3, 30, 40, *[1] * 12, 65]
        spans = [DraftSpan(0, many, many, 0, many) for many in rows]
        assert loops.most_rows == 64 and loops.catch_up(spans) == [spans[-1]]
        assert passes == [[60, 3], [30], [40, *[1] * 7], [1] * 5]
        keys = {(key.rows, key.spans) for key in reachable(0, loops.widest, loops.most_rows)}
        assert all((chunk_bucket(sum(some)), span_bucket(0)) in keys for some in passes)
        passes.clear()
        drafter.launch(DraftBatch("model", (DraftSpan(0, 2, 2, 0, 9), DraftSpan(1, 9, 5, 0, 9))))
        assert passes == [[2, 5]] and not drafted
        drafter.launch(DraftBatch("model", (DraftSpan(0, 2, 2, 3, 9), DraftSpan(1, 9, 5, 0, 9))))
        assert passes[1:] == [[5]] and [[span.slot for span in each] for each in drafted] == [[0]]
