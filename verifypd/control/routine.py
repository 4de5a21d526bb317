"""The plan of a step in which the policy has nothing to decide. The engine and the simulator make it alike."""

from __future__ import annotations

from collections.abc import Mapping

from verifypd.batch import VerifyBatch, VerifySpan
from verifypd.control.snapshot import Plan
from verifypd.inflight import Progress


def one_token_each(decoding: Mapping[int, Progress]) -> Plan | None:
    """A pass with one token for every slot, without drafts; None where the verdicts in flight are sure to end one."""
    spans = []
    for slot, request in decoding.items():
        if request.length_floor >= request.max_length:
            return None
        spans.append(VerifySpan(slot, 1, 0, None, True, min(request.length_bound, request.max_length)))
    return Plan(verify=VerifyBatch(tuple(spans)))
