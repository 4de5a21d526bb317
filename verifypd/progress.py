"""Where long work is: a bar on a terminal, a line of the log every few seconds elsewhere. Knows counts and a clock."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, Self

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger(__name__)

EVERY = 10.0  # s between two lines of a log
ROW = "|{bar:12}| {desc}"  # of a bar that stands beside others


class Bar(Protocol):
    """What shows progress. Iterating over it does one thing after the other; `update(0)` says that work goes on."""

    n: float

    def update(self, n: float = 1) -> bool | None:
        """So much more is done."""
        ...

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """A remark behind the counts."""
        ...

    def __iter__(self) -> Iterator[Any]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...


def bar(
    items: Iterable[Any] | None = None,
    *,
    desc: str,
    total: float | None = None,
    initial: float = 0,
    unit: str = "it",
    shown: bool = True,
) -> Bar:
    """Progress over `items`, or of work that says itself how far it is. unit: of a count; B is shown as MB."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    if shown and not sys.stderr.isatty():
        return Lines(items, desc=desc, total=total, initial=initial, unit=unit)
    made: Bar = tqdm(
        items, desc=desc, total=total, initial=initial, unit=unit, unit_scale=unit == "B", disable=not shown,
        leave=None,  # it goes where it stood below others
    )  # fmt: skip
    return made


class Lines:
    """Progress in a log: nothing of work that is done soon, else a line every so many seconds and one at the end."""

    def __init__(
        self,
        items: Iterable[Any] | None = None,
        *,
        desc: str,
        total: float | None = None,
        initial: float = 0,
        unit: str = "it",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.items = items
        self.desc = desc
        self.total = total
        self.unit = unit
        self.n = initial
        self.remark = ""
        self._initial = initial
        self._clock = clock
        self._begun = self._told = clock()
        self._last: tuple[float, str] | None = None  # what the last line said; None: there was none

    def update(self, n: float = 1) -> None:
        """So much more is done."""
        self.n += n
        if self._clock() - self._told >= EVERY:
            self._tell()

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """A remark behind the counts."""
        self.remark = s

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self.items or ():
                yield item
                self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        fresh = (self.n, self.remark) != self._last
        if self._last is not None and fresh and error[:1] in ((), (None,)):
            self._tell()

    def _tell(self) -> None:
        self._told, self._last = self._clock(), (self.n, self.remark)
        spent = self._told - self._begun
        scale, unit = (1e6, "MB") if self.unit == "B" else (1, self.unit)
        of = f" of {self.total / scale:.0f}" if self.total else ""
        line = f"{self.desc}: {self.n / scale:.0f}{of}{'' if unit == 'it' else ' ' + unit}, {_minutes(spent)}"
        done = self.n - self._initial
        if self.total and done > 0 and self.n < self.total:
            line += f", about {_minutes(spent / done * (self.total - self.n))} left"
        log.info("%s", f"{line}; {self.remark}" if self.remark else line)


class Rows:
    """A bar for each of several that take turns. On a terminal they stand until the end, redrawn in place; in a log
    the one that moves has a line every so many seconds."""

    def __init__(
        self, totals: Mapping[str, int], done: Mapping[str, int], *, unit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """totals: of each by its name. done: how much of that there was before."""
        self.totals, self.done, self.unit = totals, done, unit
        self._clock = clock
        self._told = clock()
        self._bars: dict[str, tqdm[Any]] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._open.enter_context(logging_redirect_tqdm())
            for name, total in self.totals.items():
                made = tqdm(total=total, bar_format=ROW, leave=False, dynamic_ncols=True)
                self._bars[name] = self._open.enter_context(made)
                self.move(name, self.done.get(name, 0), "")
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def move(self, name: str, done: float, remark: str) -> None:
        """So much of one is done now, its part of the next included."""
        total = self.totals[name]
        if own := self._bars.get(name):
            wide = max(map(len, self.totals))
            counts = f"{int(done):>{len(str(total))}}/{total} {self.unit}"
            own.n = done
            own.set_description_str(f"{name:<{wide}} {counts}  {remark}")
        elif self._clock() - self._told >= EVERY:
            self._told = self._clock()
            log.info("%s: %d of %d %s; %s", name, done, total, self.unit, remark)

    def say(self, text: str) -> None:
        """A line above the bars; in a log it is the one for now."""
        self._told = self._clock()
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60} s"
