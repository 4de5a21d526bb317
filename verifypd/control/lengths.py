"""How many tokens each request drafts: the lengths whose tokens cost least. Arithmetic over survivals and costs.

A step's decode work brings Σ (1 + survivals drafted) tokens and adds some seconds to the step: its draft loop, and what
its rows add to the pass. The plan takes the longest draft at which a token costs the fewest of these seconds, which are
the price of a token. Beside prompts, where the pass is paid for anyway, it takes the longest draft whose tokens, at
that price, exceed its seconds by most: a token not drafted now is drafted later. Within the longest draft, a request
drafts a position where its survival is worth the position's row.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

from verifypd.control.cost import NOTHING, CostModel, Work
from verifypd.control.tuning import LEAST_CHANCE

Choice = TypeVar("Choice")
NEXT_TO_NOTHING = math.ulp(1.0)  # s: where a fit finds rows for nothing, a token still has a price


class Drafting(NamedTuple):
    """One request that may draft."""

    slot: int
    curve: Sequence[float]  # survivals, as far as it may draft; none exceeds the one before
    context: int  # tokens
    lag: float  # tokens its drafter reads first, each step
    looked_up: bool = False  # by look-up: no model runs


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries before anyone drafts."""

    requests: int  # decode spans, those that cannot draft included
    decode: Work  # one row each, and drafts already written
    riding: Work = NOTHING  # prompt chunks in the same pass


@dataclass(frozen=True, slots=True)
class Option:
    """One longest draft and what it comes to."""

    longest: int
    tokens: float  # expected, one a request included
    seconds: float  # that decoding adds to the step
    draft_seconds: float = 0.0
    drafting: Sequence[Drafting] = ()
    least: float = 1.0  # survival above which a position is drafted

    @property
    def lengths(self) -> dict[int, int]:
        """slot → tokens, of those who draft any."""
        longest, least = self.longest, self.least
        curves = [(each.slot, each.curve if each.looked_up else each.curve[:longest]) for each in self.drafting]
        lengths = [(slot, sum([survival > least for survival in curve])) for slot, curve in curves]
        return {slot: length for slot, length in lengths if length}

    @property
    def per_token(self) -> float:
        """Seconds a token costs."""
        return max(self.seconds, NEXT_TO_NOTHING) / self.tokens

    def gain(self, plain: Option) -> float:
        """Tokens a second over those of plain decoding."""
        return plain.per_token / self.per_token


def options(
    drafting: Sequence[Drafting], load: Load, cost: CostModel, overlap: bool = False, price: float | None = None
) -> list[Option]:
    """What each longest draft comes to; the first drafts nothing. `overlap`: drafts run beside the verifier.

    price: seconds that a token costs in other steps; None: as the options themselves make it.
    """
    alone = cost.pass_seconds(load.riding, void=False)
    plain = Option(0, float(load.requests), _pass(load, 0, cost) - alone + cost.overhead)
    found = [plain]
    price, given = (plain.per_token, False) if price is None else (price, True)
    copied, written = _Sums([d for d in drafting if d.looked_up]), _Sums([d for d in drafting if not d.looked_up])
    before, riding = load.decode.rows + load.riding.rows, load.riding.rows > 0
    for longest in range(0 if copied.sums else 1, max(len(copied.sums), len(written.sums)) + 1):
        # where drafts reach beyond the knee, rows are charged as those before it or as those behind it
        ends = (before, before + len(drafting) * max(1, longest))
        for slope in sorted({cost.slope(rows, riding) for rows in ends}):
            least = max(LEAST_CHANCE, slope / price)
            rows, gained, context, lag = written.upto(longest, least)
            copies, more, _, _ = copied.upto(len(copied.sums), least)
            if not rows + copies:
                continue
            draft = cost.draft_seconds(longest, lag, context) if context else 0.0
            verify = _pass(load, rows + copies, cost) - alone
            seconds = (max(draft, verify) if overlap else draft + verify) + cost.overhead
            found.append(Option(longest, load.requests + gained + more, seconds, draft, drafting, least))
            price = price if given else min(price, found[-1].per_token)
    return found


class _Sums:
    """Survivals of some requests by position, the surest first, with running sums: no option looks at each of them."""

    def __init__(self, drafting: Sequence[Drafting]) -> None:
        first = sorted(drafting, key=lambda each: -each.curve[0])
        self.contexts = list(accumulate([each.context for each in first], initial=0.0))
        self.lags = list(accumulate([each.lag for each in first], initial=0.0))
        curves, self.sums = [each.curve for each in first], list[tuple[list[float], list[float]]]()
        while curves := [curve for curve in curves if len(curve) > len(self.sums)]:
            losses = sorted([-curve[len(self.sums)] for curve in curves])
            self.sums.append((losses, list(accumulate(losses, initial=0.0))))

    def upto(self, longest: int, least: float) -> tuple[int, float, float, float]:
        """Of drafts up to `longest`, as far as survivals exceed `least`: rows, tokens expected, and who drafts' context
        and lag."""
        counts = [bisect_left(losses, -least) for losses, _ in self.sums[:longest]]
        gained = -sum([sums[count] for (_, sums), count in zip(self.sums, counts, strict=False)])
        drafting = counts[0] if counts else 0
        return sum(counts), gained, self.contexts[drafting], self.lags[drafting]


def _pass(load: Load, drafts: int, cost: CostModel) -> float:
    """Seconds of the pass with so many draft tokens in it. Beside prompts they take rows that prompts would have had:
    where the padding ends does not matter."""
    return cost.pass_seconds(load.decode + load.riding + Work(rows=drafts), void=not load.riding.rows)


def first_two(found: Sequence[Choice], key: Callable[[Choice], float]) -> tuple[Choice, Choice]:
    """The one with the lowest key, and the runner-up; the same twice where there is only one."""
    ranked = sorted(found, key=key)
    return ranked[0], ranked[min(1, len(ranked) - 1)]
