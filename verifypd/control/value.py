"""The objective: a step does what brings most for its seconds.

Drafts are as long as makes the fewest seconds a token, of the seconds that decoding adds to the step. Rows ride free
beside prompts, so drafts save little there; but a token may take what it takes without prompts, times the share of the
requests with a slot that decode, over max(1, 1 + value / seconds): a second's worth. Prompts get what has the greatest

    value = (Σ waiting w · part of its prompt read) / rate  −  seconds
    w     = 1 / slo_ttft while a request waits, 1 / (slo_tpot · tokens expected) while it decodes, twice that once late

in seconds: those that decoding would take to be worth as much, less those by which the prompts lengthen the step. A
second of the step without them is worth `rate`: Σ decoding w · part of its tokens written, as many as steps bring now.
"""

from __future__ import annotations

from collections.abc import Sequence

from verifypd.control.snapshot import RequestView

MS = 1e3


def value(seconds: float, waiting: float, rate: float) -> float:
    """Of prompt tokens that lengthen the step by so much. waiting: Σ w · part read; rate: 1/s."""
    return waiting / rate - seconds


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
