"""How many tokens each request drafts: the lengths whose tokens cost least. Arithmetic over survivals and costs.

A step's decode work brings Σ (1 + survivals drafted) tokens and adds some seconds to the step: its draft loop, and what
its rows add to the pass. The plan takes the longest draft at which a token costs the fewest of these seconds, which are
the price of a token. Beside prompts, where the pass is paid for anyway, it takes the longest draft whose tokens, at
that price, exceed its seconds by most: a token not drafted now is drafted later. Within the longest draft, a request
drafts a position where its survival is worth the position's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from verifypd.control.cost import NOTHING, CostModel, Work

Choice = TypeVar("Choice")
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

    def gain(self, plain: Option) -> float:
        """Tokens a second over those of plain decoding."""
        return plain.per_token / self.per_token


def options(drafting: Sequence[Drafting], load: Load, cost: CostModel, price: float | None = None) -> list[Option]:
    """What each longest draft comes to; the first drafts nothing.

    price: seconds that a token costs in other steps; None: as the options themselves make it.
    """
    alone, before, riding = cost.pass_seconds(load.riding, void=False), load.decode + load.riding, load.riding.rows > 0
    plain = Option(0, {}, float(load.requests), _pass(before, 0, cost, riding) - alone + cost.overhead)
    found = [plain]
    deepest = max((len(each.curve) for each in drafting), default=0)
    price, given = (plain.per_token, False) if price is None else (price, True)
    near = cost.slope(before.rows, riding)
    for longest in range(0 if any(each.looked_up for each in drafting) else 1, deepest + 1):
        # where drafts reach beyond the knee, rows are charged as those before it or as those behind it
        far = cost.slope(before.rows + len(drafting) * max(1, longest), riding)
        for slope in (near,) if near == far else (min(near, far), max(near, far)):
            lengths, gained, context, lag = _lengths(drafting, longest, slope / price)
            if not lengths:
                continue
            draft = cost.draft_seconds(longest, lag, context) if context else 0.0
            verify = _pass(before, sum(lengths.values()), cost, riding) - alone
            seconds = draft + verify + cost.overhead
            found.append(Option(longest, lengths, load.requests + gained, seconds))
            price = price if given else min(price, found[-1].per_token)
    return found


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


def _pass(before: Work, drafts: int, cost: CostModel, riding: bool) -> float:
    """Seconds of the pass with so many draft tokens in it. Beside prompts they take rows that prompts would have had:
    where the padding ends does not matter."""
    rows, *others = before
    return cost.pass_seconds(Work(rows + drafts, *others), void=not riding)


def first_two(found: Sequence[Choice], key: Callable[[Choice], float]) -> tuple[Choice, Choice]:
    """The one with the lowest key, and the runner-up; the same twice where there is only one."""
    ranked = sorted(found, key=key)
    return ranked[0], ranked[min(1, len(ranked) - 1)]
