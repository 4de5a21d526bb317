"""What a verdict means for its request, and what a policy is told of it. Knows no passes and no memory."""

from __future__ import annotations

from verifypd.batch import Verdict, VerifySpan
from verifypd.config import EngineConfig
from verifypd.control.observe import Observation
from verifypd.engine.terms import terms_of
from verifypd.lanes.verify import PassResult
from verifypd.request import Logprob, Request, TokenOrigin

LOOKUP = "ngram"  # the drafter that copies


def confirm(request: Request, verdict: Verdict, now: float) -> None:
    """Its tokens are the request's, from now (s) on."""
    metrics, tokens, drafted, accepted = request.metrics, verdict.tokens, verdict.drafted, verdict.accepted
    if tokens and request.output_len == 0:
        metrics.first_token_time = now
    else:
        metrics.count(drafted, accepted, len(tokens))
    if tokens:
        request.last_output = now
    if drafted:
        request.last_draft = (drafted, accepted)
    request.tokens.extend(tokens)
    if request.logprobs is not None:
        for token, (own, rank, top) in zip(tokens, verdict.logprobs, strict=True):
            request.logprobs.append(_logprobs(token, own, rank, top, request.params.logprobs or 0))


def origins(span: VerifySpan, verdict: Verdict) -> list[TokenOrigin]:
    """Who wrote each token of a verdict. All but the last are drafts that stood; the last may be one too."""
    drafter = "lookup" if span.drafter == LOOKUP else "draft"
    made = [TokenOrigin(drafter)] * min(verdict.accepted, len(verdict.tokens))
    if len(verdict.tokens) == len(made):
        return made
    if verdict.accepted < verdict.drafted:
        return [*made, TokenOrigin("correction", verdict.drafts[verdict.accepted : verdict.drafted])]
    return [*made, TokenOrigin("bonus" if verdict.drafted else "plain")]


def observation(request: Request, span: VerifySpan, verdict: Verdict, tau: float, config: EngineConfig) -> Observation:
    """What became of a draft, or of a single token, in counts. tau: the drafter's temperature."""
    terms = terms_of(request, config)
    return Observation(
        request.order,
        verdict.drafted,
        verdict.accepted,
        len(verdict.tokens),
        terms.coupled,
        terms.greedy,
        terms.temperature,
        span.drafter,
        tau if request.params.draft_temperature is None else None,
    )


def take_prompt_logprobs(request: Request, span: VerifySpan, result: PassResult) -> None:
    """Keep the logprobs of the prompt tokens that a chunk's rows predicted."""
    if request.prompt_logprobs is None or span.start is None:
        return
    for row, (own, rank, top) in enumerate(result.prompt_logprobs.get(span.slot, ())):
        position = span.start + row + 1  # the row predicts the next token of the prompt
        if position == len(request.prompt_logprobs) < request.prompt_len:
            wanted = request.params.prompt_logprobs or 0
            request.prompt_logprobs.append(_logprobs(request.tokens[position], own, rank, top, wanted))


def _logprobs(token: int, own: float, rank: int, top: tuple[tuple[int, float], ...], wanted: int) -> dict[int, Logprob]:
    """The token itself and the `wanted` most likely ones."""
    entries = {token: Logprob(own, rank)}
    for place, (other, value) in enumerate(top[:wanted]):
        entries.setdefault(other, Logprob(value, place + 1))
    return entries
