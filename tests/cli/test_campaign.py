"""What a terminal shows of a benchmark while its runs go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_campaign import Pacer, campaign
from verifypd.bench.play import Call, Limits, play
from verifypd.bench.workload import Arrival, Workload
from verifypd.cli.campaign import _watch


class Bar:
    """Keeps what it is told."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.n = 0.0
        self.remarks: list[str] = []
        self.closed = False

    def update(self, n: float = 1) -> None:
        self.n += n

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self.remarks.append(s)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: Any) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    made: list[Bar] = []

    def bar(**options: Any) -> Bar:
        made.append(Bar(**options))
        return made[-1]

    monkeypatch.setattr("verifypd.progress.bar", bar)
    return made


def test_a_bar_moves_while_long_requests_run(
    bars: list[Bar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No request has ended at the first looks, and their tokens and first tokens are shown."""
    monkeypatch.setattr("verifypd.bench.play.TICK", 0.05)
    asyncio.run(campaign(tmp_path, [Pacer("one", 0.02)], [0], output=20, control=None).run(_watch()))
    assert [bar.options["desc"] for bar in bars] == ["1/2 closed 2, one", "2/2 poisson 200/s, one"]
    for bar in bars:
        assert bar.closed and bar.n == bar.options["total"] == 6
    early, late = next(each for each in bars[0].remarks if "TTFT" in each), bars[0].remarks[-1]
    assert early.startswith("2 under way, ") and "E2E" not in early
    assert int(early.split("way, ")[1].split(" tok/s")[0]) > 0
    assert "E2E p95 0." in late
    assert capsys.readouterr().err.count("seed 0, one: ") == 2


def test_tokens_and_percentiles_are_of_all_requests_so_far(bars: list[Bar], tmp_path: Path) -> None:
    def call(outputs: list[float], tokens: int) -> Call:
        made = Call(Arrival(0.0, 8, 100), 0, lambda: 10.0, 1.0, sent=1.0)
        made.outputs, made.tokens = outputs, tokens
        return made

    watch = _watch()
    watch.begin(campaign(tmp_path, [Pacer("one")]).left()[0], 0, 1)
    watch.call(call([2.0, 4.0], 30))
    watch.call(call([], 0))  # it failed
    watch.tick([call([4.0, 9.0], 20), call([], 0)])
    assert bars[0].remarks == ["2 under way, 5 tok/s, TTFT p95 3.00 s, E2E p95 3.00 s"] and bars[0].n == 2
    watch.tick([])
    assert len(bars[0].remarks) == 1, "between requests there is no news"


def test_a_look_is_at_requests_under_way_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what goes wrong in it is not passed over."""
    monkeypatch.setattr("verifypd.bench.play.TICK", 0.03)
    seen: list[tuple[int, int]] = []
    work = Workload("w", 0.0, tuple(Arrival(0.0, 8, tokens) for tokens in (2, 20, 20)), 3)
    begun = asyncio.run(
        play(Pacer("one", 0.01), work, Limits(5.0, 5.0), lambda _: None, lambda g: seen.append((len(g), g[0].tokens)))
    )
    assert seen[0][0] in (2, 3) and seen[-1][0] == 2 and seen[-1][1] > seen[0][1] > 0
    assert len(seen) <= begun.seconds / 0.03

    def broken(_: object) -> None:
        raise ValueError("no terminal")

    with pytest.raises(ValueError, match="no terminal"):
        asyncio.run(play(Pacer("one", 0.01), work, Limits(5.0, 5.0), lambda _: None, broken))
