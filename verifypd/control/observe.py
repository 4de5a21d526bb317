"""What a policy is told after the fact: how a draft fared and how long a step took. Counts and times, never a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Observation(NamedTuple):
    """One verdict of a decode span, in counts. `drafted` is 0 for a span without drafts."""

    request_id: int
    drafted: int  # tokens the drafter really proposed
    accepted: int  # of those, how many stand
    emitted: int  # tokens that reached the request, the correction or bonus token included
    coupled: bool
    greedy: bool
    temperature: float  # the request's own
    drafter: str | None
    tau: float | None = 1.0  # times the request's temperature: what the drafter drew with; None: fixed, not chosen


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The work of one step and its seconds. Rows and contexts of the verify pass include the chunks that ride in it.

    With `prefill_seconds` > 0 the chunks ran in a pass of their own, otherwise they rode in the verify pass.
    """

    draft_requests: int = 0
    draft_steps: int = 0  # longest draft: what the loop costs
    draft_rows: int = 0  # tokens caught up with
    draft_context: float = 0.0  # Σ context of the drafting requests, tokens
    verify_requests: int = 0
    verify_rows: int = 0
    verify_context: float = 0.0  # Σ context, tokens
    chunk_rows: int = 0
    chunk_context: float = 0.0  # Σ chunk × context, tokens²
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_wait: float = 0.0  # s the longest-waiting of the drafting requests stood in the decode lane
    step_seconds: float = 0.0  # s from this step to the next, host work included; 0: not measured

    @property
    def device_seconds(self) -> float:
        """Lanes one after the other."""
        return self.draft_seconds + self.verify_seconds + self.prefill_seconds

    @property
    def chunk_seconds(self) -> float:
        """Of `verify_seconds`, the share of the chunks that rode in the pass: that of its rows."""
        rode = self.verify_rows and not self.prefill_seconds
        return self.verify_seconds * self.chunk_rows / self.verify_rows if rode else 0.0

    @property
    def seconds(self) -> float:
        """What the step took: measured where it was, else the sum of its lanes."""
        return self.step_seconds or self.device_seconds
