"""How many prompt tokens join a step, and how many a draft's cache catches up with: the chunk rules of `auto`.

Arithmetic over costs and targets. Knows no architecture and no clock; chooses sizes, never an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from verifypd.control.allocation import Allocation
from verifypd.control.cost import CostModel
from verifypd.control.snapshot import RequestView, Snapshot

SMALLEST_CHUNK = 32  # tokens: prefill always progresses
CHUNK_FACTOR = 4  # a chunk is at most this many times the setting
WORTHWHILE = 1.02  # times as fast, by token, that a longer chunk must be while nobody decodes
HURRY = 2.5  # times its length without a chunk that a step may last for the sake of late prompts
DEBT = 0.25  # part of a step that may go to bringing drafts' caches up to date
EARLY, LATE = 0.25, 0.6  # parts of the target for the first token by which prompts must be done, or chunks may cost
# those who decode something: first as much as keeps pace with `plain`, then whatever fits the inter-token target


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a prompt chunk is to join."""

    rows: float  # verifier rows without the chunk
    context: float  # Σ context of them, tokens
    draft_seconds: float = 0.0
    start: int = 0  # tokens of the prompt already computed
    apart: bool = False  # whether the chunk gets a pass of its own

    def seconds(self, cost: CostModel, chunk: int) -> float:
        """What the step takes with a chunk of so many tokens."""
        end = self.start + chunk
        alone = self.draft_seconds + cost.overhead
        if not chunk or self.apart:
            passes = cost.verify_seconds(max(1.0, self.rows), self.context)
            return alone + passes + cost.verify_seconds(chunk, end, chunk * end)
        return alone + cost.verify_seconds(self.rows + chunk, self.context + end, chunk * end, mixed=True)

    def free(self, cost: CostModel) -> int:
        """Tokens of a chunk that cost no more than one does: the rows up to the knee."""
        knee = cost.coefficients.knee
        return int(knee if self.apart else knee - self.rows)


class Chunk(NamedTuple):
    """What prompts get of a step."""

    tokens: int
    pressed: bool = False  # prompts would be late: drafts should leave them more of the step


def prefill_chunk(
    snapshot: Snapshot,
    ready: Sequence[RequestView],
    cost: CostModel,
    drafting: Allocation | None,
    stretch: float,
    apart: bool,
    idle: bool = False,
) -> Chunk:
    """As many prompt tokens as ride for nothing: up to the rows at which a pass begins to cost more.

    Where the prompts would not be done in time at that pace, as many as make the step as long as one of `plain` with
    its chunk, or the whole chunk where requests wait for a slot; then as many as `plain`, whose steps are shorter,
    computes in the same time; where that is not enough, or where more have waited too long than decode, as many as fit
    the tightest inter-token target in flight. A prompt past its early aim hurries nobody past that target while its
    first token comes in time all the same. Where nothing is drafted, never more than `plain` takes while requests
    decode: longer steps hold up those who decode, and with them the slots that others wait for; and no less where no
    token rides for nothing, as on a CPU: shorter chunks would only be more passes.
    `drafting`: what the step drafts, where that is known; `stretch`: how much longer that makes it; `apart`: chunks get
    a pass of their own; `idle`: nothing is drafted.
    """
    waiting = [view for view in snapshot.requests if view.prefill_left]
    if not waiting or not cost.known:
        return Chunk(snapshot.prefill_chunk)
    if not ready:
        return Chunk(_alone(snapshot.prefill_chunk, cost))
    served = ready[: snapshot.batch_size]
    step = Step(
        rows=len(served) + (drafting.rows if drafting else 0.0),
        context=float(sum([view.length_bound for view in served])),
        draft_seconds=drafting.draft_seconds if drafting else 0.0,
        start=min(waiting, key=lambda view: view.rank).chunk_start,
        apart=apart,
    )
    if idle and step.free(cost) <= 0:
        return Chunk(snapshot.prefill_chunk)
    pace = round(snapshot.prefill_chunk * min(CHUNK_FACTOR, stretch))
    target, first = min([view.slo_tpot for view in served]) * 1e-3, snapshot.slo_ttft * 1e-3
    free = chunk_within(cost, target, step, max(1, min(pace, step.free(cost)), snapshot.prefill_chunk // 2))
    if _in_time(waiting, free / step.seconds(cost, free), EARLY * first, missed=True):
        return Chunk(free)
    even = snapshot.prefill_chunk
    if not snapshot.waiting:
        even = _even(step, cost, len(served), snapshot.prefill_chunk)
    crowd = 2 * sum(view.since_output >= LATE * first for view in waiting) >= len(served)
    paced = chunk_within(cost, target, step, pace)
    if not crowd and _in_time(waiting, even / step.seconds(cost, even), EARLY * first, missed=False):
        gentle = _in_time(waiting, paced / step.seconds(cost, paced), LATE * first, missed=True)
        return Chunk(min(even, paced) if gentle else even)
    if not crowd and _in_time(waiting, paced / step.seconds(cost, paced), LATE * first, missed=False):
        return Chunk(paced, pressed=True)
    if idle:
        return Chunk(even, pressed=True)
    # late: a step that emits several tokens for each request may last as many times the target of one
    tokens = drafting.tokens / max(1, len(served)) if drafting else 1.0
    longer = min(target * tokens, HURRY * step.seconds(cost, 0))
    hurried = chunk_within(cost, max(target, longer), step, CHUNK_FACTOR * snapshot.prefill_chunk)
    return Chunk(max(even, hurried), pressed=True)


def _alone(chunk: int, cost: CostModel) -> int:
    """Tokens of a chunk while nobody decodes: more than set only where fewer passes save time.

    Where they do not, the first prompts of many are done sooner, and their requests decode beside the rest.
    """
    longer = CHUNK_FACTOR * chunk
    apart = CHUNK_FACTOR * (cost.verify_seconds(chunk, 0.0) + cost.overhead)
    return longer if apart > WORTHWHILE * (cost.verify_seconds(longer, 0.0) + cost.overhead) else chunk


def draft_chunk(snapshot: Snapshot, cost: CostModel, chosen: Allocation | None) -> int:
    """As many tokens for a draft's cache to catch up with as a share of the step takes.

    The debt is paid once, and until it is the request cannot draft: to pay sooner only costs a longer gap now.
    """
    row = cost.coefficients.draft_row
    if chosen is None or not row or not cost.known:
        return snapshot.draft_chunk
    return max(snapshot.draft_chunk, min(CHUNK_FACTOR * snapshot.draft_chunk, int(DEBT * chosen.seconds / row)))


def chunk_within(cost: CostModel, target: float, step: Step, most: int) -> int:
    """Most prompt tokens, up to `most`, that keep a step within `target` seconds.

    Prefill always progresses: half as long again as the step takes without a chunk is allowed, and a quarter more than
    with the smallest one, where what a chunk costs is mostly the same for any size.
    """
    low = min(SMALLEST_CHUNK, most)
    budget = max(target, 1.5 * step.seconds(cost, 0), 1.25 * step.seconds(cost, low))
    return _largest(cost, step, budget, low, most)


def _largest(cost: CostModel, step: Step, budget: float, low: int, high: int) -> int:
    """Most tokens of a chunk, from `low` to `high` and to within 8, with which the step fits the budget (s)."""
    if step.seconds(cost, high) <= budget:
        return high
    while high - low > 8:
        middle = (low + high) // 2
        low, high = (middle, high) if step.seconds(cost, middle) <= budget else (low, middle)
    return low


def _even(step: Step, cost: CostModel, requests: int, chunk: int) -> int:
    """Tokens of a chunk with which a step lasts no longer than one of `plain` with a chunk as set."""
    plain = replace(step, rows=float(requests), draft_seconds=0.0).seconds(cost, chunk)
    return _largest(cost, step, plain, max(1, chunk // 4), chunk)


def _in_time(waiting: Sequence[RequestView], rate: float, target: float, missed: bool) -> bool:
    """Whether prompts computed at `rate` tokens a second, in order of rank, have their first token by then.

    Where those past it count (`missed`), a backlog keeps the pace up; for those past saving there is no hurry.
    """
    tokens = 0
    for view in sorted(waiting, key=lambda view: view.rank):
        tokens += view.prefill_left
        if target < view.since_output + tokens / rate and (missed or view.since_output < target):
            return False
    return True
