"""How many tokens each request may draft, and what that comes to. Arithmetic over survivals and costs.

A step's decode work brings Σ (1 + survivals drafted) tokens and adds some seconds to the step: its draft loop, and what
its rows add to the pass. Within the longest draft, a request drafts a position where its survival is worth the
position's row. The longest draft with the fewest seconds a token is taken, or the one that brings most where a token is
worth more seconds than those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verifypd.control.cost import NOTHING, CostModel, Work

NEXT_TO_NOTHING = math.ulp(1.0)  # s: where a fit finds rows for nothing, a token still has a price


class Drafting(NamedTuple):
    """One request that may draft."""

    slot: int
    curve: Sequence[float]  # survivals, as far as it may draft
    context: int  # tokens
    lag: float  # tokens its drafter reads first, each step
    looked_up: bool = False  # by look-up: no model runs


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries before anyone drafts."""

    requests: int  # decode spans, those that cannot draft included
    decode: Work  # one row each, and drafts already written
    riding: Work = NOTHING  # prompt chunks in the same pass


class Option(NamedTuple):
    """One longest draft and what it comes to."""

    longest: int
    lengths: dict[int, int]  # slot → tokens
    tokens: float  # expected, one a request included
    seconds: float  # that decoding adds to the step

    @property
    def per_token(self) -> float:
        """Seconds a token costs."""
        return max(self.seconds, NEXT_TO_NOTHING) / self.tokens


def options(drafting: Sequence[Drafting], load: Load, cost: CostModel, worth: float = 0.0) -> list[Option]:
    """What each longest draft comes to; the first drafts nothing. worth: s a token may take at least."""
    host = 0.0 if load.riding.rows else cost.overhead  # beside prompts the step is made anyway
    alone, before = cost.pass_seconds(load.riding), load.decode + load.riding
    plain = Option(0, {}, float(load.requests), cost.pass_seconds(before) - alone + host)
    found = [plain]
    deepest = max((len(each.curve) for each in drafting), default=0)
    price = max(worth, plain.per_token)
    for longest in range(0 if any(each.looked_up for each in drafting) else 1, deepest + 1):
        # where drafts reach beyond the knee, rows are charged as those before it or as those behind it
        ends = before.rows, before.rows + len(drafting) * max(1, longest)
        for row in sorted({cost.slope(rows, load.riding.rows > 0) for rows in ends}):
            lengths, gained, context, lag = _lengths(drafting, longest, row / price)
            if not lengths:
                continue
            draft = cost.draft_seconds(longest, lag, context) if context else 0.0
            verify = cost.pass_seconds(before + Work(rows=sum(lengths.values()))) - alone
            found.append(Option(longest, lengths, load.requests + gained, draft + verify + host))
            price = max(worth, min(price, found[-1].per_token))
    return found


def best_two(found: Sequence[Option], worth: float = 0.0) -> tuple[Option, Option]:
    """What to draft, and the runner-up; the same twice where there is only one. worth: s a token may take at least."""
    price = max(worth, min([option.per_token for option in found]))
    ranked = sorted(found, key=lambda option: option.seconds - price * option.tokens)
    return ranked[0], ranked[min(1, len(ranked) - 1)]


def _lengths(drafting: Sequence[Drafting], longest: int, least: float) -> tuple[dict[int, int], float, float, float]:
    """Who drafts how much where a survival above `least` is worth its row: slot → tokens, the tokens they are expected
    to bring, and of those that a model drafts, context and lag."""
    lengths, gained, context, lag = {}, 0.0, 0.0, 0.0
    for slot, curve, tokens, behind, looked_up in drafting:
        length = 0
        for survival in curve if looked_up else curve[:longest]:
            if survival <= least:
                break
            gained += survival
            length += 1
        if length:
            lengths[slot] = length
            if not looked_up:
                context += tokens
                lag += behind
    return lengths, gained, context, lag
