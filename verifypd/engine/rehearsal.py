"""Runs before the first request what requests would wait for otherwise: kernels that are compiled, or loaded, when they
first come. To load one, the driver waits until the device is idle, and the host stops that long. Passes and draft loops
are captured at start; what follows a pass is not. Knows engines; times nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from verifypd.batch import DraftBatch, VerifyBatch
from verifypd.buckets import CHUNKS, row_bucket
from verifypd.control.snapshot import Plan
from verifypd.engine.engine import Engine
from verifypd.engine.scratch import GREEDY, SHORT, Point, Probe, aside, forget, length_of, plan_of, run_step, scratch
from verifypd.request import SamplingParams
from verifypd.runtime.streams import synchronize

# Drawn, and drawn with noise of a seed; every cut is one kernel.
SAMPLED = (replace(GREEDY, temperature=0.8, top_p=0.9), replace(GREEDY, temperature=0.8, seed=1))
REPORTED = replace(GREEDY, logprobs=1, repetition_penalty=1.1, presence_penalty=0.1)
CHUNK = 16  # prompt tokens beside a draft
TILE = 8  # rows by which libraries choose the kernel of a product: those of a whole tile, or of one more


def rehearse(engine: Engine, whole: bool = True) -> None:
    """Steps without drafts, with drafts, and with some who draft and some who do not, of requests that are drawn or
    not; beside a prompt; and logits that bring every kernel. Not `whole`: greedy steps alone, for a quick start."""
    probe, most = Probe(), engine.config.max_draft if engine.drafter else 0
    context = min(SHORT, engine.max_model_len // 2)
    with aside(engine, probe):
        for params in (GREEDY, *SAMPLED) if whole else (GREEDY,):
            for point in dict.fromkeys((Point(1, 0, context), Point(1, most, context), Point(2, most, context))):
                _step(engine, probe, point, params)
        if whole:
            _step(engine, probe, Point(1, 0, context), REPORTED)
            _step(engine, probe, Point(1, most, context, chunk=CHUNK), GREEDY)
    engine.check()
    if whole:
        _logits(engine)


def _step(engine: Engine, probe: Probe, point: Point, params: SamplingParams) -> None:
    """One step of a point, if it fits; the first of several requests drafts nothing."""
    requests = scratch(engine, point, params) if length_of(point) <= engine.max_model_len else []
    if not requests:
        return
    plan = plan_of(engine, point, requests)
    probe.next = plan if point.requests == 1 else _uneven(plan)
    try:
        run_step(engine)
    finally:
        forget(engine, requests)


def _uneven(plan: Plan) -> Plan:
    """The same without the draft of the first request."""
    assert plan.verify is not None
    first, *others = plan.verify.spans
    alone = first._replace(rows=1, drafts=0, context=first.context - first.drafts, drafter=None)
    drafts = tuple(span for span in plan.draft.spans if span.slot != first.slot) if plan.draft else ()
    return Plan(
        draft=DraftBatch(plan.draft.drafter, drafts) if plan.draft and drafts else None,
        verify=VerifyBatch((alone, *others)),
    )


@torch.inference_mode()
def _logits(engine: Engine) -> None:
    """The largest first: its memory serves the others."""
    runner, model = engine.verify.runner, engine.verify.runner.model
    for rows in logit_rows(engine):
        runner.logits(torch.zeros(rows, model.config.hidden_size, dtype=model.activation_dtype, device=model.device))
    synchronize(engine.slots.device)


def logit_rows(engine: Engine) -> list[int]:
    """Numbers of rows that bring every kernel of the logits, the most first: what passes are padded to, and tiles."""
    config = engine.config
    most = config.batch_size * (config.max_draft + 1 if engine.drafter else 1) + CHUNKS
    padded = {min(row_bucket(n), most) for n in range(1, most + 1)}
    return sorted(padded | {n for n in range(1, most + 1) if n % TILE in (0, 1)}, reverse=True)
