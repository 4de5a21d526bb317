"""What a request asks for, as policies are told: worked out once, for one is told of every request in every step."""

from __future__ import annotations

from typing import NamedTuple

from verifypd.config import EngineConfig
from verifypd.control.tuning import MEAN_OUTPUT
from verifypd.request import Request


class Terms(NamedTuple):
    """Its parameters, and the engine's settings where it leaves something open. Fields are as in `RequestView`."""

    config: EngineConfig  # whose settings these are
    rank: tuple[int, int]
    draft_limit: int  # 0: it does not want any
    prompt_logprobs: int
    slo_ttft: float
    slo_tpot: float
    greedy: bool
    coupled: bool
    temperature: float
    draft_temperature: float | None


def terms_of(request: Request, config: EngineConfig) -> Terms:
    """The terms of a request; kept with it until the settings change."""
    found: Terms | None = request.terms
    if found is None or found.config is not config:
        found = request.terms = _terms(request, config)
    return found


def _terms(request: Request, config: EngineConfig) -> Terms:
    params = request.params
    limit = config.max_draft if params.max_draft is None else min(params.max_draft, config.max_draft)
    own = params.draft_temperature
    first, further = targets(request, config)
    return Terms(
        config=config,
        rank=request.rank(),
        draft_limit=limit if params.speculation else 0,
        prompt_logprobs=-1 if request.prompt_logprobs is None else params.prompt_logprobs or 0,
        slo_ttft=first,
        slo_tpot=further,
        greedy=params.greedy,
        coupled=params.coupled(config.acceptance),
        temperature=params.temperature,
        draft_temperature=config.draft_temperature if own is None else own,
    )


def targets(request: Request, config: EngineConfig, expected: float = MEAN_OUTPUT) -> tuple[float, float]:
    """ms for its first token and for each further one: its own, or the engine's; a deadline leaves half for each.

    expected: tokens it will come to, at most. No first token can be asked for within less than a step may last, and no
    further one within less than a millisecond: whoever asked for it would take everybody else's time.
    """
    params = request.params
    first = config.slo_ttft if params.slo_ttft is None else params.slo_ttft
    further = config.slo_tpot if params.slo_tpot is None else params.slo_tpot
    if params.deadline_ms is not None:
        first = min(first, params.deadline_ms / 2)
        further = min(
            further, params.deadline_ms / 2 / max(1.0, min(request.max_length - request.prompt_len, expected))
        )
    return max(first, config.slo_gap), max(further, 1.0)
