"""Where long work is: a bar on a terminal, a line of the log every few seconds elsewhere. Knows counts and a clock."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol, Self

from tqdm import tqdm

log = logging.getLogger(__name__)

EVERY = 10.0  # s between two lines of a log


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
        items, desc=desc, total=total, initial=initial, unit=unit, unit_scale=unit == "B", disable=not shown
    )
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


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60} s"
