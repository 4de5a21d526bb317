"""A draft head in the engine: what it is given to read, what is believed of its cache, and what its drafts count as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.arms import make, prompts
from tests.engine.heads import eagle3_for
from tests.models.checkpoints import VOCAB
from verifypd import LLM, SamplingParams
from verifypd.request import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SILENT = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, speculation=False)
WHOLE: dict[str, Any] = {"prefill_chunk": 256, "draft_chunk": 256}
LONG = [3 + (i * i * 7 + i * 13) % 300 for i in range(48)]


def positions(llm: LLM, ids: list[list[int]], params: SamplingParams = GREEDY) -> list[tuple[list[int], list[int]]]:
    """Drafted and accepted tokens by position, of each request."""
    outputs = llm.generate(ids, params)
    return [(out.metrics.drafted_per_position, out.metrics.accepted_per_position) for out in outputs]


@pytest.fixture(scope="module")
def familiar(pair: tuple[Path, Path]) -> list[list[int]]:
    """Prompts like the text the head was taught on: its drafts stand now and then."""
    seeds = torch.randint(3, VOCAB, (48, 4), generator=torch.Generator().manual_seed(0))[:8].tolist()
    with make(pair, "plain", "none") as llm:
        outputs = llm.generate(seeds, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    return [ids + out.outputs[0].token_ids for ids, out in zip(seeds, outputs, strict=True)]


# -- what counts -------------------------------------------------------------------------------------------------------


def test_a_stop_inside_accepted_drafts_is_no_rejection(pair: tuple[Path, Path]) -> None:
    """The verifier as its own draft: every draft token stands, those after a stop were never judged."""
    with make(pair, "unified", str(pair[0]), draft_quantization="none") as llm:
        [whole] = llm.generate([LONG], GREEDY)
        text = whole.outputs[0].token_ids
        assert whole.metrics.accepted == whole.metrics.drafted > 20
        ends = set()
        for stop in dict.fromkeys(text[2:14]):
            params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
            [out] = llm.generate([LONG], params)
            assert out.outputs[0].token_ids == text[: text.index(stop) + 1]
            assert out.metrics.accepted == out.metrics.drafted == sum(out.metrics.accepted_per_position)
            ends.add((text.index(stop) - 1) % 4)
    assert ends >= {0, 1, 2}, "stops at every place of a draft"


def listen(llm: LLM, any_length: bool = False) -> dict[tuple[int, int], list[int]]:
    """What the head drafts from now on, by request and position: drafts of three, or of any length."""
    engine: Any = llm.engine
    head, said = engine.decode.drafters["head"], {}
    launch = head.launch

    def note(batch: Any) -> None:
        launch(batch)
        for span in batch.spans:
            if span.drafts == 3 or (span.drafts and any_length and span.drafter in (None, "head")):
                order, length = engine.running[span.slot].order, int(engine.slots.lengths[span.slot])
                said[order, length] = engine.slots.drafts[span.slot, : span.drafts].tolist()

    head.launch = note
    return said


def rates(found: list[tuple[list[int], list[int]]]) -> list[float]:
    """Chance that a draft stands up to each position, over all requests."""
    drafted, accepted = ([sum(column) for column in zip(*part, strict=True)] for part in zip(*found, strict=True))
    return [a / d for a, d in zip(accepted, drafted, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [{"prefill_chunk": 5, "draft_chunk": 3}, {"late_tickets": True}, {"prefill_chunk": 7, "late_tickets": True}],
    ids=["chunked", "late", "both"],
)
def test_drafts_stand_as_often_however_their_inputs_came(
    pair: tuple[Path, Path], familiar: list[list[int]], settings: dict[str, Any]
) -> None:
    with make(pair, "unified", "head", **WHOLE) as llm:
        drafts = listen(llm)
        expected = positions(llm, familiar)
    with make(pair, "unified", "head", **{**WHOLE, **settings}) as llm:
        said = listen(llm)
        found = positions(llm, familiar)
    assert sum(accepted[0] for _, accepted in expected) > 20
    same = drafts.keys() & said.keys()
    assert len(same) > 100 and all(said[at] == drafts[at] for at in same)
    if "draft_chunk" not in settings:  # no span waits for a cache that catches up: the same spans
        assert [accepted for _, accepted in found] == [accepted for _, accepted in expected]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_drafts_stand_as_often_after_a_preemption(
    pair: tuple[Path, Path], familiar: list[list[int]], prefix_cache: bool
) -> None:
    """What is computed again is read again: no draft starts from what is not there."""
    with make(pair, "unified", "head", prefix_cache=prefix_cache, **WHOLE) as llm:
        drafts = listen(llm)
        expected = positions(llm, familiar)
    with make(pair, "unified", "head", prefix_cache=prefix_cache, **WHOLE) as llm:
        said = listen(llm)
        llm._submit(familiar, [GREEDY] * len(familiar))
        requests = list(llm.engine.waiting)
        while llm.engine.busy:
            for request in list(llm.engine.running.values()):
                if request.output_len > 8 and not request.metrics.preemptions:
                    llm.engine.residents.preempt(request)
            llm.engine.step()
        assert all(request.metrics.preemptions == 1 for request in requests)
        found = [(r.metrics.drafted_per_position, r.metrics.accepted_per_position) for r in requests]
    same = drafts.keys() & said.keys()
    assert len(same) > 100 and all(said[at] == drafts[at] for at in same)
    assert rates(found) == pytest.approx(rates(expected), abs=0.03)


# -- features ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted_before", [False, True])
def test_a_prefix_hit_brings_the_features_too(
    pair: tuple[Path, Path], familiar: list[list[int]], drafted_before: bool
) -> None:
    with make(pair, "unified", "head", **WHOLE) as llm:
        expected = positions(llm, familiar)
    with make(pair, "unified", "head", **WHOLE) as llm:
        llm.generate(familiar, GREEDY if drafted_before else SILENT)
        assert bool(llm.engine.memory._read) == drafted_before, "nobody drafted, nothing was read"
        outputs = llm.generate(familiar, GREEDY)
        assert all(out.metrics.cached_tokens == 24 for out in outputs)
        assert [(o.metrics.drafted_per_position, o.metrics.accepted_per_position) for o in outputs] == expected


def test_a_prefix_hit_is_the_verifiers_own_affair(pair: tuple[Path, Path], familiar: list[list[int]]) -> None:
    """A head that has lost some of a prefix begins behind it; what is cached is as without a head."""
    ids = familiar[0]
    with make(pair, "unified", "head", **WHOLE) as llm:
        [whole] = llm.generate([ids], GREEDY)
        memory, head = llm.engine.memory, llm.engine.decode.drafters["head"]
        assert memory.draft is not None
        stranger = Request("x", ids, SILENT, seed=0, choice=0, order=10_000, max_length=64, arrival=0.0)
        digest = memory._prefix(stranger, 24)[2]
        memory.forget(stranger)
        block = memory.draft.blocks.by_digest.pop(digest)  # evicted from one pool and not from the other
        del memory.draft.blocks.digest_of[block]
        del memory.draft.blocks.cached[block]
        memory.draft.blocks.free.append(block)
        said = listen(llm)
        [again] = llm.generate([ids], GREEDY)
        assert again.outputs[0].token_ids == whole.outputs[0].token_ids
        assert again.metrics.cached_tokens == 24
        assert again.metrics.span_emitted >= whole.metrics.span_emitted > 20, "tokens that were drafted for"
        for tensor in (head.runner.cache.data, head.reader.data):
            tensor.fill_(1e3)  # what it has not read, it must not see
        llm.generate([ids], GREEDY)
        second, third = sorted({order for order, _ in said})
        drafts = [{at: tokens for (order, at), tokens in said.items() if order == each} for each in (second, third)]
        assert drafts[0] == drafts[1] and len(drafts[0]) > 20
        [out] = llm.generate([ids], SamplingParams(max_tokens=2, prompt_logprobs=1))
        assert out.metrics.cached_tokens == 0, "every row of a prompt with logprobs is computed"


def test_features_are_not_kept_while_nobody_can_draft(pair: tuple[Path, Path], familiar: list[list[int]]) -> None:
    with make(pair, "unified", "head") as llm:
        engine = llm.engine
        head: Any = engine.decode.drafters["head"]

        def kept() -> int:
            """Rows that were written to."""
            return int(head.reader.data.any(1).sum())

        engine.switch("plain")
        llm._submit(familiar[:1], [GREEDY])
        for _ in range(8):
            engine.step()
        [request] = engine.running.values()
        assert not kept() and request.unread and request.output_len
        engine.switch("unified")
        while engine.busy:
            engine.step()
        assert request.metrics.drafted > 10, "the head begins where features are kept again"
        [out] = llm.generate(familiar[:1], GREEDY)
        assert out.metrics.drafted and out.metrics.cached_tokens == 24, "as many as without a head"
        assert out.outputs[0].token_ids == request.output_ids


@pytest.mark.parametrize("late", [False, True])
def test_a_head_reads_each_chunk_in_the_step_after_it(pair: tuple[Path, Path], late: bool) -> None:
    """The first token leaves before the head has read the last chunk, and before that it has read all others."""
    with make(pair, "unified", "head", prefill_chunk=16, late_tickets=late) as llm:
        engine: Any = llm.engine
        drafter, calls = engine.decode.drafters["head"], []
        follow, launch = drafter.follow, engine.verify.launch
        drafter.follow = lambda spans: (calls.append([(s.start, s.rows) for s in spans]), follow(spans))[1]
        engine.verify.launch = lambda batch, replay=True: (calls.append("pass"), launch(batch, replay))[1]
        llm._submit([LONG], [GREEDY])
        [request] = engine.waiting
        while not request.output_len:
            engine.step()
        expected = ["pass", [(0, 16)], "pass", [(16, 16)], "pass", [(32, 16)], "pass"]
        assert calls[:7] == expected if late else calls == expected[:5]
        engine.step()
        assert calls[5] == [(32, 16)] and request.draft_lag <= 2 + 4 * late
        while engine.busy:
            engine.step()


@pytest.mark.parametrize("back", ["unified", "pdv"])
@pytest.mark.parametrize("kind", ["head", "eagle3", "both"])
def test_what_was_not_kept_is_never_seen(pair: tuple[Path, Path], tmp_path: Path, kind: str, back: str) -> None:
    """Whatever lies where no feature was kept and nothing was read, the drafts are the same."""
    name = str(eagle3_for(pair[0], tmp_path / "eagle3")) if kind == "eagle3" else kind
    heard: list[dict[tuple[int, int], list[int]]] = []
    for poison in (1e3, -5.0):
        with make(pair, "unified", name, late_tickets=back == "pdv") as llm:
            engine: Any = llm.engine
            head, said = engine.decode.drafters["head"], listen(llm, any_length=True)
            llm._submit(prompts(6), [GREEDY] * 6)
            for step in range(400):
                if step == 2:
                    engine.switch("plain")
                if step == 7:
                    engine.switch(back)
                    unread = [r for r in engine.running.values() if r.unread]
                    assert unread
                    for block in {b for r in unread for b in engine.memory.draft.blocks.held[r.order]}:
                        head.reader.data[block * 8 : block * 8 + 8] = poison
                        head.runner.cache.data[:, :, block] = poison
                if not engine.busy:
                    break
                engine.step()
            heard.append(said)
    assert heard[0] == heard[1] and len(heard[0]) > 30


def test_a_head_reads_no_prompt_while_nobody_drafts(pair: tuple[Path, Path], familiar: list[list[int]]) -> None:
    """What it has not read it reads when drafting begins, and drafts as if it had all along."""
    with make(pair, "unified", "head", **WHOLE) as llm:
        drafts = listen(llm)
        llm.generate(familiar[1:2], GREEDY)
    with make(pair, "unified", "head", **WHOLE) as llm:
        engine: Any = llm.engine
        engine.architecture.controller.length = 0
        llm._submit(familiar[:1], [GREEDY])
        [first] = engine.waiting
        engine.step()
        engine.step()
        llm._submit(familiar[1:2], [GREEDY])
        late = engine.waiting[-1]
        for _ in range(4):
            engine.step()
        assert first.draft_lag >= len(familiar[0]), "not even where nobody decodes beside it"
        assert late.draft_lag >= len(familiar[1])
        said = listen(llm)
        engine.architecture.controller.length = 3
        while engine.busy:
            engine.step()
    found = {at: tokens for (order, at), tokens in said.items() if order == late.order}
    expected = {at: tokens for (_, at), tokens in drafts.items()}
    same = found.keys() & expected.keys()
    assert len(same) > 10 and all(found[at] == expected[at] for at in same)


# -- the lag of its cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", ["head", "model"])
def test_the_lag_is_what_is_really_missing(pair: tuple[Path, Path], drafter: str, late: bool) -> None:
    """Drafts that fell are no tokens to catch up with, whenever their verdict arrives."""
    with make(pair, "unified", drafter, late_tickets=late) as llm:
        engine: Any = llm.engine
        model, read = engine.decode.drafters[drafter], {}
        launch = model.launch

        def note(batch: Any) -> None:
            launch(batch)
            read.update({span.slot: int(engine.slots.lengths[span.slot]) for span in batch.spans if span.drafts})

        model.launch = note
        llm._submit(prompts(6), [GREEDY] * 6)
        controller = engine.architecture.controller
        for length in (3, 0, 0, 0, 3, 3, 0, 0, 3, 0, 0, 0):
            controller.length = length
            for _ in range(2 if length else 1):
                engine.step()
            if length == 0 and controller.length == 0:
                for slot, request in engine.running.items():
                    if slot in read and not request.lag_slack and not request.finished:
                        missing = int(engine.slots.lengths[slot]) - read[slot]
                        slack = 1 if drafter == "model" else 0  # it keeps what stood of its drafts
                        assert missing - 3 * slack <= request.draft_lag <= missing + slack
        assert read
