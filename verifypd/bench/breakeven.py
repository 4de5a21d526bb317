"""What acceptance speculation needs before it pays, by the cost model. Knows times and chances; nothing of requests."""

from __future__ import annotations

from verifypd.control.cost import CostModel, Work


def step_seconds(cost: CostModel, requests: int, drafts: int, context: float, lag: int = 0) -> float:
    """A step in which each of `requests` drafts and verifies `drafts` tokens, with `context` tokens each.

    `lag`: tokens of each request that the drafter reads first; 0 where it keeps no cache.
    """
    total = requests * context
    seconds = cost.pass_seconds(Work(requests * (drafts + 1), total)) + cost.overhead
    if not drafts:
        return seconds
    return seconds + cost.draft_seconds(drafts, lag * requests, total)


def gain(cost: CostModel, alpha: float, requests: int, drafts: int, context: float, lag: int = 0) -> float:
    """Tokens a second over those of plain decoding, when each draft token stands with chance `alpha` after the last."""
    tokens = sum(alpha**i for i in range(drafts + 1))
    plain = step_seconds(cost, requests, 0, context)
    return tokens * plain / step_seconds(cost, requests, drafts, context, lag)


def break_even(cost: CostModel, requests: int, drafts: int, context: float, lag: int = 0) -> float | None:
    """The least α at which drafts of this length are worth their time; None where even α = 1 is not enough."""
    if gain(cost, 1.0, requests, drafts, context, lag) < 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        enough = gain(cost, middle, requests, drafts, context, lag) >= 1.0
        low, high = (low, middle) if enough else (middle, high)
    return high
