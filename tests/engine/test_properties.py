"""Random arrivals, priorities, aborts, preemptions and architectures: nothing leaks, every text equals its solo run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verifypd import LLM, SamplingParams
from verifypd.request import Request

LIMIT = 96
ARCHITECTURES = ("plain", "baseline", "pd", "pdv", "unified", "table", "auto")


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: tuple[int, ...]
    tokens: int
    seed: int | None
    priority: int
    abort_after: int | None  # steps


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt=st.lists(st.integers(3, 9), min_size=1, max_size=40).map(tuple),
        tokens=st.integers(1, 30),
        seed=st.one_of(st.none(), st.integers(0, 3)),
        priority=st.integers(0, 2),
        abort_after=st.one_of(st.none(), st.integers(0, 12)),
    ),
    min_size=1,
    max_size=9,
)


def request(arrival: Arrival, order: int) -> Request:
    params = SamplingParams(
        temperature=0.0 if arrival.seed is None else 1.0,
        seed=arrival.seed,
        max_tokens=arrival.tokens,
        priority=arrival.priority,
    )
    length = min(LIMIT, len(arrival.prompt) + arrival.tokens)
    return Request(str(order), arrival.prompt, params, seed=arrival.seed or 0, max_length=length, order=order)


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]):
    with LLM(
        str(pair[0]),
        draft=None,
        arch="plain",
        dtype="float32",
        measure_costs=False,
        max_model_len=LIMIT,
        kv_memory="32MB",
        prefix_cache=False,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def engines(pair: tuple[Path, Path]):
    """By drafter and lateness, each made when it is first asked for. Few slots and a small pool, so that queueing and
    preemption happen by themselves."""
    made: dict[tuple[str, bool], LLM] = {}
    head = str(pair[0].parent / "head")
    drafts = {"ngram": "ngram", "model": str(pair[1]), "head": head, "both": f"{head},ngram", "twin": str(pair[0])}

    def get(drafter: str, late: bool) -> LLM:
        if (drafter, late) not in made:
            made[drafter, late] = LLM(
                str(pair[0]),
                draft=drafts[drafter],
                arch="pdv",
                verify_batch=2,
                verify_wait_ms=20.0,
                dtype="float32",
                controller="fixed",
                measure_costs=False,
                max_draft=3,
                draft_quantization="none" if drafter == "twin" else "auto",
                max_model_len=LIMIT,
                batch_size=3,
                queue_factor=1.5,
                kv_memory=420_000,
                prefill_chunk=9,
                draft_chunk=12,
                block_size=8,
                late_tickets=late,
            )
        return made[drafter, late]

    yield get
    for llm in made.values():
        llm.shutdown()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "model", "head", "both", "twin"])
@settings(max_examples=16, suppress_health_check=list(HealthCheck))
@given(
    arrivals=ARRIVALS,
    preempt=st.sets(st.integers(0, 40), max_size=4),
    arch=st.sampled_from(ARCHITECTURES),
    switches=st.dictionaries(st.integers(0, 40), st.sampled_from(ARCHITECTURES), max_size=4),
)
def test_every_text_equals_its_solo_run(engines, plain, drafter, late, arrivals, preempt, arch, switches) -> None:
    engine = engines(drafter, late).engine
    engine.switch(arch)
    pending = [(arrival.step, request(arrival, 1000 + i), arrival) for i, arrival in enumerate(arrivals)]
    made = [r for _, r, _ in pending]
    started: dict[int, int] = {}
    for step in range(2000):
        for at, each, _ in pending:
            if at == step:
                engine.add(each)
                started[each.order] = step
        for _, each, arrival in pending:
            if arrival.abort_after is not None and started.get(each.order, 9999) + arrival.abort_after == step:
                engine.finish(each)
        running = [r for r in engine.running.values() if not r.finished and not r.preempting]
        if step in preempt and running:
            engine.residents.preempt(max(running, key=Request.rank))
        if step in switches:
            engine.switch(switches[step])
        engine.step()
        engine.check()
        if not engine.busy and len(started) == len(pending):
            break
    assert not engine.busy, "every request must end"
    for each, arrival in zip(made, arrivals, strict=True):
        solo = plain.generate([list(arrival.prompt)], each.params)[0].outputs[0].token_ids
        if each.finish_reason == "abort":
            assert each.output_ids == solo[: each.output_len], "what an aborted request got is right as far as it goes"
        else:
            assert each.output_ids == solo
        if drafter == "twin":
            assert each.metrics.accepted == each.metrics.drafted, (
                "a verifier's twin is right as long as it lacks nothing"
            )
