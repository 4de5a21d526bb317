"""A drafter need not loop: one that proposes all tokens at once, in the engine and in the prices it is planned by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.arms import make
from tests.engine.conftest import pair  # noqa: F401
from verifypd import SamplingParams
from verifypd.batch import DraftBatch
from verifypd.control.cost import Coefficients, CostModel
from verifypd.control.observe import StepTiming

ALLOWED = (7, 9, 11, 200)  # tokens that may be drawn


class AtOnce:
    """Draws every token of a draft from one fixed distribution, in one operation."""

    name, has_cache, point_mass, reader, keeps_drafts = "model", False, False, None, True
    routine, one_pass, follows = 0, True, False

    def __init__(self, engine: Any) -> None:
        self.slots, self.draft_q = engine.slots, engine.slots.draft_q
        self.q = torch.zeros(self.draft_q.shape[2])
        self.q[list(ALLOWED)] = torch.tensor([0.4, 0.3, 0.2, 0.1])
        self.noise = torch.Generator().manual_seed(0)
        self.launches = 0

    def launch(self, batch: DraftBatch) -> None:
        for span in batch.spans:
            self.slots.drafts[span.slot] = torch.multinomial(
                self.q, self.slots.drafts.shape[1], replacement=True, generator=self.noise
            )
            self.slots.draft_lens[span.slot] = span.drafts
            self.draft_q[span.slot] = self.q
        self.launches += 1

    def follow(self, spans: Any) -> None: ...

    def admitted(self, request: Any) -> None: ...

    def expected(self, request: Any) -> int:
        return int(self.slots.drafts.shape[1])

    def observe(self, requests: Any) -> None: ...

    def forget(self, request: Any) -> None: ...

    def close(self) -> None: ...


@pytest.mark.slow
def test_texts_follow_the_verifiers_law(pair: tuple[Path, Path]) -> None:  # noqa: F811
    """Drawn by rejection from what it really drew from: the second token has the verifier's distribution."""
    params = SamplingParams(temperature=1.0, allowed_token_ids=list(ALLOWED), max_tokens=3, ignore_eos=True)
    many: dict[str, Any] = {"max_draft": 3, "seed": 5, "batch_size": 250, "prefill_chunk": 900, "draft_chunk": 900}
    counts: dict[bool, torch.Tensor] = {}
    for speculate in (False, True):
        with make(pair, "unified" if speculate else "plain", "model", **many) as llm:
            drafter = None
            if speculate:
                drafter = AtOnce(llm.engine)
                llm.engine.drafter = llm.engine.decode.drafters["model"] = drafter  # type: ignore[assignment]
            outputs = llm.generate([[5, 6, 7]] * 1500, params)
            seconds = torch.tensor([ALLOWED.index(output.outputs[0].token_ids[1]) for output in outputs])
            counts[speculate] = torch.bincount(seconds, minlength=4).double()
            assert drafter is None or (drafter.launches and llm.engine.stats.accepted)
    both = counts[False] + counts[True]
    chi2 = float(((counts[False] - both / 2) ** 2 / (both / 2) * 2).sum())
    assert chi2 < 3 + 10 * 6**0.5, chi2


def test_longer_drafts_cost_no_more_steps() -> None:
    loop, once = CostModel(Coefficients()), CostModel(Coefficients())
    once.one_pass = True
    assert loop.draft_seconds(4, 0.0, 0.0) == pytest.approx(4 * loop.draft_seconds(1, 0.0, 0.0))
    assert once.draft_seconds(4, 0.0, 0.0) == once.draft_seconds(1, 0.0, 0.0)
    assert once.prices(1, 0.0)[1] == 0.0 < loop.prices(1, 0.0)[1]
    for length in (1, 2, 4) * 40:
        once.observe(StepTiming(draft_requests=1, draft_steps=length, draft_rows=2, draft_seconds=2e-3))
    assert once.draft_seconds(4, 2.0, 0.0) == pytest.approx(2e-3, rel=0.1)
