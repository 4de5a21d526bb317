"""The objective: what a plan is worth. Every choice of drafts and of prompt tokens is the one with the greatest value.

    value = price · tokens  +  (Σ waiting w · part of its prompt read) / rate  −  seconds
    w     = 1 / slo_ttft while a request waits, 1 / (slo_tpot · tokens expected) while it decodes, twice that once late

in seconds: those that decoding alone would take to bring as much, less those that the plan takes. Decoding alone, in a
step without prompts, brings a token in `price` seconds, and `rate` is its Σ decoding w · part of its tokens written, a
second. So without prompts the plan with the fewest seconds a token has the greatest value; and drafts do not vanish
beside prompts: that they make later steps cheaper is in the price.
"""

from __future__ import annotations

from collections.abc import Sequence

from verifypd.control.snapshot import RequestView

MS = 1e3


def value(seconds: float, tokens: float = 0.0, price: float = 0.0, waiting: float = 0.0, rate: float = 1.0) -> float:
    """Of a plan, or of what a part of it adds. price: s a token; waiting: Σ w · part read; rate: 1/s."""
    return price * tokens + waiting / rate - seconds


def weight(target: float, late: bool) -> float:
    """Of a request with so many ms to a token, whose target has passed or not."""
    return (2.0 if late else 1.0) * MS / target


def decode_worth(views: Sequence[RequestView], tokens: float, mean_output: float, least: float = 0.0) -> float:
    """Σ w · part written in a step that brings each of these `tokens`, where requests come to `mean_output` tokens on
    average. A target below `least`, the ms a token that decoding alone takes, counts as that: nothing can keep it."""
    total = 0.0
    for view in views:
        part, target = min(1.0, tokens / view.expected_left(mean_output)), max(view.slo_tpot, least)
        late = view.decoding * MS > target * max(1, view.emitted)
        total += weight(target, late) / mean_output * part
    return total
