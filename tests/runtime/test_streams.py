"""Tickets: immediate and late delivery, order, and the limit on what is in flight."""

from __future__ import annotations

import pytest
import torch

from verifypd.runtime.streams import PINNED, HostCopy, Inflight, Ticket, copies, taken


class SlowCopy(HostCopy):
    """A copy that is done when told so, as one from a device would be."""

    def __init__(self, value: int) -> None:
        super().__init__({"x": torch.tensor([value])})
        self.arrived = False

    def done(self) -> bool:
        return self.arrived


def ticket(value: int, copy: HostCopy | None = None) -> Ticket:
    copy = copy or HostCopy({"x": torch.tensor([value])})
    return Ticket(batch=value, copy=copy, read=lambda arrays: int(arrays["x"][0]))


def test_an_immediate_ticket_is_absorbed_in_the_next_round() -> None:
    inflight = Inflight()
    assert inflight.finished() == []
    inflight.add(ticket(7))
    assert [t.result() for t in inflight.finished()] == [7]
    assert len(inflight) == 0


def test_late_tickets_arrive_one_round_later_and_two_are_out_at_once() -> None:
    inflight = Inflight(delay=1)
    arrived = []
    for step in range(5):
        arrived.append([t.result() for t in inflight.finished()])
        inflight.add(ticket(step))
    assert arrived == [[], [], [0], [1], [2]]
    assert len(inflight) == 2


def test_a_ticket_still_running_holds_back_those_behind_it() -> None:
    inflight = Inflight(limit=3)
    slow = SlowCopy(0)
    inflight.finished()
    inflight.add(ticket(0, slow))
    inflight.add(ticket(1))
    assert inflight.finished() == []
    slow.arrived = True
    assert [t.result() for t in inflight.finished()] == [0, 1]


def test_at_the_limit_the_oldest_is_waited_for() -> None:
    inflight = Inflight(limit=2)
    inflight.finished()
    inflight.add(ticket(0, SlowCopy(0)))
    assert inflight.finished() == []
    inflight.add(ticket(1, SlowCopy(1)))
    assert [t.result() for t in inflight.finished()] == [0]
    assert len(inflight) == 1


def test_arrived_tickets_need_not_wait_for_the_next_round() -> None:
    inflight = Inflight(limit=3)
    inflight.add(ticket(0))
    inflight.add(ticket(1, SlowCopy(1)))
    inflight.add(ticket(2))
    assert [t.result() for t in inflight.arrived()] == [0]
    late = Inflight(delay=1)
    late.add(ticket(0))
    assert late.arrived() == []


def test_drain_gives_everything() -> None:
    inflight = Inflight(delay=1)
    inflight.add(ticket(1))
    assert [t.result() for t in inflight.drain()] == [1]
    assert len(inflight) == 0


class Countdown:
    """Stands in for a CUDA event that comes to pass after so many questions."""

    def __init__(self, questions: int) -> None:
        self.left = questions
        self.slept = 0

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def synchronize(self) -> None:
        self.slept += 1


@pytest.mark.parametrize(("wait", "asked", "slept"), [("spin", 50, 0), ("block", 0, 1)])
def test_a_copy_is_polled_or_slept_for(wait: str, asked: int, slept: int) -> None:
    copy = HostCopy({"x": torch.tensor([7])}, wait)
    event = Countdown(50)
    copy._ready = event  # type: ignore[assignment]
    assert copy.wait()["x"].tolist() == [7]
    assert (50 - event.left, event.slept) == (asked, slept)


@pytest.mark.parametrize("wait", ["spin", "block"])
def test_on_a_cpu_there_is_nothing_to_wait_for(wait: str) -> None:
    copy = HostCopy({"x": torch.tensor([7])}, wait)
    assert copy.done() and copy.wait()["x"].tolist() == [7]


def test_what_runs_beside_the_rest_is_not_waited_for() -> None:
    """Prompts on multiprocessors of their own: verdicts of others overtake them, those of the same slot do not."""
    inflight = Inflight(limit=2)
    inflight.finished()
    prompt = SlowCopy(0)
    beside = ticket(0, prompt)
    beside.slots, beside.apart = frozenset({1}), True
    inflight.add(beside)
    for value, slots in ((1, {2}), (2, {2, 3}), (3, {3})):
        each = ticket(value, SlowCopy(value))
        each.slots = frozenset(slots)
        inflight.add(each)
    assert inflight.away == {1}
    assert [t.result() for t in inflight.finished()] == [1, 2]  # as many as exceed the limit, in order
    assert inflight.finished() == [] and inflight.away == {1}
    same = ticket(4)
    same.slots, same.apart = frozenset({1}), True
    inflight.add(same)
    assert inflight.finished() == []  # done, but its slot has something before it
    prompt.arrived = True
    assert [t.result() for t in inflight.finished()] == [0, 4]
    assert inflight.away == set() and len(inflight) == 1


def test_tickets_that_were_not_absorbed_come_first_again() -> None:
    inflight = Inflight()
    for value in range(3):
        inflight.add(ticket(value))
    first, *others = inflight.finished()
    inflight.add(ticket(3))
    inflight.put_back(others)
    assert len(inflight) == 3
    assert [each.result() for each in [first, *inflight.finished()]] == [0, 1, 2, 3]


def test_a_pause_is_short_and_ends_with_the_ticket() -> None:
    inflight = Inflight()
    inflight.pause("block")  # nothing is out
    copy = SlowCopy(0)
    inflight.add(ticket(0, copy))
    inflight.pause("spin")
    copy.arrived = True
    inflight.pause("block")
    assert [t.result() for t in inflight.finished()] == [0]


def test_pinned_memory_is_kept_for_all_who_may_be_admitted_at_once() -> None:
    for requests in (1, 154, 1000):
        assert all(copies(size, requests) >= 2 * requests for size in (16, 32, 64, 512))
        assert sum(size * copies(size, requests) for size in PINNED) < 64 << 20
    assert taken(torch.device("cpu")) == {}
