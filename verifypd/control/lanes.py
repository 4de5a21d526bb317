"""How the lanes share a pipelined step: priority, weights, ageing. Numbers in, a number out; no clock."""

from __future__ import annotations

from verifypd.control.snapshot import Snapshot


def prompt_tokens(snapshot: Snapshot) -> int:
    """The prefill lane's part of a step of `batch_size` + `prefill_chunk` tokens.

    Decode and verify have priority: a row for each of their requests and drafts comes first. Prompts get what is left,
    but no less than their share of weight × requests, so that a longer queue gets more, and no less than half of the
    step once one of them has waited half its target. No lane starves: each is sure of a token.
    """
    prompts = [view for view in snapshot.requests if view.prefill_left]
    others = [view for view in snapshot.requests if not view.prefill_left]
    weights = dict(snapshot.lane_weights)
    pressure = weights.get("prefill", 1.0) * len(prompts)
    total = pressure + sum([weights.get("verify" if view.pending else "decode", 1.0) for view in others])
    share = pressure / total if prompts else 0.0
    if any(view.waited * 1e3 >= view.slo_ttft / 2 for view in prompts):
        share = max(share, 1 / 2)
    step, taken = snapshot.batch_size + snapshot.prefill_chunk, sum([view.pending + 1 for view in others])
    return min(max(step - taken, int(step * share), 1), snapshot.prefill_chunk)
