"""The books of a request: bounds hold whatever the device decides, and the draft's lag is never too low."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifypd.inflight import CAUGHT_UP, NO_DRAFT, Draft, Progress


class Device:
    """What is true: the length on the device, the tokens in the draft's cache, and the verdicts on their way."""

    def __init__(self, prompt: int) -> None:
        self.length = prompt
        self.cached = 0  # tokens in the draft's cache
        self.verdicts: deque[int] = deque()

    def judge(self, drafts: int, stand: int, kept: bool) -> None:
        stand = min(stand, drafts)
        if kept:  # its cache holds all drafts but the last, which nobody fed to it
            self.cached = self.length + min(stand, drafts - 1)
        self.length += stand + 1
        self.verdicts.append(stand + 1)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["catch up", "draft", "decode", "absorb"]), st.integers(1, 5), st.integers(0, 5)),
    max_size=60,
)


@given(prompt=st.integers(1, 50), keeps=st.booleans(), events=EVENTS)
def test_bounds_hold_and_the_lag_is_never_too_low(prompt: int, keeps: bool, events: list[tuple[str, int, int]]) -> None:
    """Drafts are judged at once by the device and learnt of any number of steps later by the host."""
    host, device = Progress(prompt, 1000), Device(prompt)
    host.admitted(0, draft_lag=prompt)
    exact = True  # whether the lag is what is missing once nothing is in flight
    for event, number, stand in events:
        if event == "catch up":
            host.caught_up(host.draft_lag)
            device.cached = device.length
            assert host.draft_lag == 0
            exact = True
        elif event == "draft" and host.draft_lag == 0:
            host.drafted(Draft(number, "model"))
            assert host.pending == number
            host.launched(number, kept=keeps)
            device.judge(number, stand, keeps)
            exact = not keeps
        elif event == "decode":
            host.launched(0, kept=False)
            device.judge(0, 0, False)
        elif event == "absorb" and device.verdicts:
            host.absorbed(device.verdicts.popleft())
        missing = device.length - device.cached
        assert host.length_floor <= device.length <= host.length_bound
        assert missing <= host.draft_lag <= missing + host.lag_slack + (not exact)
    while device.verdicts:
        host.absorbed(device.verdicts.popleft())
    assert host.length_floor == device.length == host.length_bound == host.confirmed
    assert not host.inflight and host.lag_slack == 0
    if exact:
        assert host.draft_lag == device.length - device.cached


def test_a_draft_waits_then_flies_then_is_judged() -> None:
    host = Progress(10, 100)
    draft = Draft(3, "model", 0.7)
    host.drafted(draft)
    assert (host.pending, host.draft) == (3, draft)
    host.launched(3, kept=True)
    assert (host.pending, host.draft) == (0, NO_DRAFT)
    assert (host.length_floor, host.length_bound, host.draft_lag) == (11, 14, CAUGHT_UP)
    assert host.absorbed(2) is draft
    assert (host.length_floor, host.length_bound, host.confirmed) == (12, 12, 12)


def test_drafts_are_verified_whole_or_not_at_all() -> None:
    host = Progress(10, 100)
    host.drafted(Draft(3))
    with pytest.raises(AssertionError, match="as they stand"):
        host.launched(2, kept=False)
    host.launched(0, kept=False)
    assert host.pending == 0 and host.length_bound == 11


def test_a_verdict_from_before_the_draft_caught_up_changes_no_lag() -> None:
    host = Progress(10, 100)
    host.drafted(Draft(4))
    host.launched(4, kept=False)
    assert host.draft_lag == 5 == host.lag_slack + 1
    host.caught_up(5)  # the device read what there really was
    assert host.draft_lag == host.lag_slack == 0
    host.launched(0, kept=False)
    host.absorbed(1)  # of the draft: all fell
    assert host.draft_lag == 1
    host.absorbed(1)
    assert host.draft_lag == 1


def test_prompt_rows_read_behind_the_verifier_leave_the_verdict_open() -> None:
    host = Progress(10, 100)
    host.admitted(0, draft_lag=10)
    host.read(10)
    host.launched(0, kept=False)
    host.followed(10)
    assert (host.computed, host.draft_lag) == (10, 1)
    host.absorbed(0)  # it had ended
    assert host.draft_lag == 0


def test_a_cache_that_begins_anew_lags_by_what_it_says() -> None:
    host = Progress(10, 100)
    host.launched(0, kept=False)
    host.begun(draft_lag=0)
    host.absorbed(1)
    assert host.draft_lag == 0
