"""The verify lane reads what the device wrote: how many drafts of a verdict were judged."""

from __future__ import annotations

import numpy as np
import pytest

from verifypd.batch import VerifyBatch, VerifySpan
from verifypd.lanes.verify import _read
from verifypd.sampling.case import Finish


@pytest.mark.parametrize(
    ("finish", "count", "judged"),
    [
        (Finish.RUNNING, 3, 4),  # two drafts stood, the third fell
        (Finish.LENGTH, 2, 2),  # it ended with the second: nobody looked at the third
        (Finish.STOP, 2, 2),
        (Finish.ERROR, 2, 4),  # the third fell, and no token was allowed in its place
    ],
)
def test_drafts_that_were_judged(finish: Finish, count: int, judged: int) -> None:
    batch = VerifyBatch((VerifySpan(0, rows=5, drafts=4, start=None, emits=True, context=20),))
    tokens = [11, 12, 13, 0, 0][:count] + [0] * (5 - count)
    result = _read(batch, {"verdicts": np.array([[count, 2, 4, finish, 0, *tokens]])})
    [verdict] = result.verdicts
    assert verdict is not None and (verdict.accepted, verdict.drafted) == (2, judged)
    assert verdict.tokens == (11, 12, 13)[:count]
