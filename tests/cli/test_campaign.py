"""What a terminal shows of a benchmark while its runs go on."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_campaign import Pacer, campaign
from verifypd import cli
from verifypd.bench.play import Call, Limits, play
from verifypd.bench.workload import Arrival, Workload
from verifypd.cli.campaign import _watch
from verifypd.progress import Rows


class Kept(Rows):
    """Keeps what it is told."""

    def __init__(self, **totals: int) -> None:
        super().__init__(totals, {}, unit="runs")
        self.moves: list[tuple[str, float, str]] = []
        self.said: list[str] = []

    def move(self, name: str, done: float, remark: str) -> None:
        self.moves.append((name, done, remark))

    def say(self, text: str) -> None:
        self.said.append(text)


def test_the_bar_of_an_arm_moves_while_its_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while no request has ended; a run that fails is not one that is done."""
    monkeypatch.setattr("verifypd.bench.play.TICK", 0.05)
    rows, arms = Kept(one=2, two=2), [Pacer("one", 0.02), Pacer("two", fails=True)]
    asyncio.run(campaign(tmp_path, arms, [0], output=20, control=None).run(_watch(rows, Counter(one=3))))
    moves = [(done, remark) for name, done, remark in rows.moves if name == "one"]
    assert moves[0] == (3, "closed 2") and moves[-1][0] == 5
    during = [(done, remark) for done, remark in moves if remark.endswith(": closed 2")]
    assert len(during) > 10 and during == sorted(during) and 3 < during[0][0] < 3.34 and 3.8 < during[-1][0] < 4
    share, speed, pace = re.fullmatch(r"(\d+)%, (\d+) tok/s, TPOT p95 ([\d.]+) ms: closed 2", during[-1][1]).groups()  # type: ignore[union-attr]
    assert int(share) == pytest.approx(100 * (during[-1][0] - 3), abs=1) and int(speed) > 30 and 20 <= float(pace) < 40
    assert ("two", 0, "FAILED") in rows.moves
    assert sum(", seed 0, one: " in line for line in rows.said) == 2 == sum("two: FAILED" in line for line in rows.said)


def test_speed_and_pace_are_of_all_requests_so_far(tmp_path: Path) -> None:
    def call(outputs: list[float], tokens: int) -> Call:
        made = Call(Arrival(0.0, 8, 4), 0, lambda: 10.0, 1.0, sent=1.0)
        made.outputs, made.tokens = outputs, tokens
        return made

    rows = Kept(one=1)
    watch = _watch(rows, Counter())
    watch.begin(campaign(tmp_path, [Pacer("one")]).left()[0], 0, 1)  # six requests of four tokens
    watch.call(call([2.0, 4.0], 3))
    watch.call(call([], 0))  # it failed
    watch.tick([call([4.0, 5.5], 2), call([], 0)])
    watch.tick([])
    assert [remark.partition(":")[0] for *_, remark in rows.moves[1:]] == ["42%, 0 tok/s, TPOT p95 1500.0 ms"]
    assert rows.moves[-1][1] == pytest.approx((4 + 4 + 2) / 24)


def test_what_was_run_before_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are in the order of the arms, each with the runs of its second name behind it."""
    made: list[tuple[dict[str, int], Counter[str]]] = []

    class Told(Rows):
        def __init__(self, totals: Any, done: Any, **options: Any) -> None:
            made.append((dict(totals), Counter(done)))
            super().__init__(totals, done, **options)

    monkeypatch.setattr("verifypd.progress.Rows", Told)
    command = ["bench", "simulate", "three-way", "--quick", "--num-requests", "3", "--out", str(tmp_path), "--no-png"]
    for seeds in ("1", "2"):
        assert cli.main([*command, "--arm", "plain", "--arm", "pd", "--seeds", seeds]) == 0
    assert list(made[0][0].items()) == [("plain", 1), ("plain again", 1), ("pd", 1)]
    assert made[1] == ({"plain": 2, "plain again": 2, "pd": 2}, Counter(made[0][0]))


def test_a_look_is_at_requests_under_way_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what goes wrong in it is not passed over."""
    monkeypatch.setattr("verifypd.bench.play.TICK", 0.03)
    seen: list[list[int]] = []  # tokens so far of those under way, at each look
    work = Workload("w", 0.0, tuple(Arrival(0.0, 8, tokens) for tokens in (2, 20, 20)), 3)
    begun = asyncio.run(
        play(Pacer("one", 0.01), work, Limits(5.0, 5.0), lambda _: None, lambda g: seen.append([c.tokens for c in g]))
    )
    assert seen and all(1 <= len(look) <= 3 and 0 < max(look) <= 20 for look in seen)
    assert sum(seen[-1]) > sum(seen[0]) or len(seen) == 1, "they go on"
    assert len(seen) <= begun.seconds / 0.03

    def broken(_: object) -> None:
        raise ValueError("no terminal")

    with pytest.raises(ValueError, match="no terminal"):
        asyncio.run(play(Pacer("one", 0.01), work, Limits(5.0, 5.0), lambda _: None, broken))
