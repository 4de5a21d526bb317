"""Long work says where it is: a bar on a terminal, lines in a log."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from tqdm import tqdm

from verifypd import progress
from verifypd.progress import Lines, Rows, bar

NAME = "verifypd.progress"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == NAME]


@pytest.fixture
def clock(caplog: pytest.LogCaptureFixture) -> list[float]:
    caplog.set_level(logging.INFO, logger=NAME)
    return [100.0]


def test_a_log_gets_a_line_every_ten_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with Lines(desc="evaluating", total=60, unit="prompts", clock=lambda: clock[0]) as shown:
        for _ in range(30):
            clock[0] += 1.0
            shown.update()
        assert lines(caplog) == [f"evaluating: {n} of 60 prompts, {n} s, about {60 - n} s left" for n in (10, 20, 30)]
        shown.set_postfix_str("speed")
        for _ in range(300):  # nothing is done, but work goes on
            clock[0] += 1.0
            shown.update(0)
        shown.update(30)
    found = lines(caplog)
    assert len(found) == 3 + 30 + 1
    assert found[3] == "evaluating: 30 of 60 prompts, 40 s, about 40 s left; speed"
    assert found[-1] == "evaluating: 60 of 60 prompts, 5 min 30 s; speed", "the last one says how long it took"


def test_short_work_says_nothing(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    for _ in Lines(range(5), desc="soon", clock=lambda: clock[0]):
        clock[0] += 1.0
    assert lines(caplog) == []


def test_iterating_counts(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    for item in Lines("abc", desc="letters", total=3, clock=lambda: clock[0]):
        seen.append(item)
        clock[0] += 11.0
    assert seen == ["a", "b", "c"]
    assert lines(caplog)[0] == "letters: 1 of 3, 11 s, about 22 s left"


def test_bytes_are_megabytes(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with Lines(desc="model", total=93e6, unit="B", clock=lambda: clock[0]) as shown:
        clock[0] += 31.0
        shown.update(31e6)
    assert lines(caplog)[0] == "model: 31 of 93 MB, 31 s, about 62 s left"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with bar(desc="x", total=3) as shown:
        assert isinstance(shown, tqdm) and not shown.disable
    with bar(desc="x", total=3, shown=False) as hidden:
        assert isinstance(hidden, tqdm) and hidden.disable
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert isinstance(bar([1, 2], desc="x"), progress.Lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_stand_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is drawn in its own line; a line that is said goes above them, and in the end they are gone."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with Rows({"one": 12, "another": 12}, {"one": 3}, unit="runs") as rows:
        first = shown.getvalue()
        assert "one      3/12 runs" in first and "another  0/12 runs" in first
        rows.move("another", 1.5, "50%, 80 tok/s")
        moved = shown.getvalue().removeprefix(first)
        assert "another  1/12 runs  50%, 80 tok/s" in moved and "one      3" not in moved
        assert moved.startswith("\n") and "\x1b[A" in moved, "one line down, and up again"
        rows.say("a run has ended")
        said = shown.getvalue().removeprefix(first + moved)
        assert said.index("a run has ended\n") < said.index("one      3/12") < said.index("another  1/12")
    assert shown.getvalue().rstrip("\r").endswith(" ")


def test_rows_are_lines_of_a_log(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """One every ten seconds, of whichever moves then."""
    with Rows({"one": 12, "another": 12}, {"one": 3}, unit="runs", clock=lambda: clock[0]) as rows:
        for second in range(1, 25):
            clock[0] += 1.0
            rows.move("one" if second < 15 else "another", 3 + second / 100, f"at {second} s")
        rows.say("a run has ended")  # a line of its own, which says as much
        clock[0] += 9.0
        rows.move("another", 4, "")
    assert lines(caplog) == ["one: 3 of 12 runs; at 10 s", "another: 3 of 12 runs; at 20 s"]
