"""`verifypd top`: a server's essentials in a terminal, again and again. Draws with rich; knows nothing of figures."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verifypd.bench.client import HTTPError
from verifypd.errors import RequestError
from verifypd.watch.essentials import lines
from verifypd.watch.scrape import Samples, Scraper

WINDOW = 10.0  # s that figures are taken over


def table(scraper: Scraper, seen: deque[tuple[float, Samples]]) -> Table:
    """The figures of what was seen."""
    (then, before), (now, after) = seen[0], seen[-1]
    made = Table(title=Text(f"{scraper.address}, last {now - then:.0f} s"), title_justify="left")
    made.add_column("figure")
    made.add_column("now", justify="right")
    made.add_column("", style="dim")
    for line in lines(after, before, max(now - then, 1e-3)):
        made.add_row(Text(line.name), Text(line.value), Text(line.note))
    return made


async def watch(url: str, interval: float, once: bool, console: Console) -> None:
    """Draw until interrupted, or once. A server that goes away is waited for; one that never was there is refused."""
    scraper = Scraper(url)
    seen: deque[tuple[float, Samples]] = deque()
    await look(scraper, seen)
    if once:
        await asyncio.sleep(interval)
        await look(scraper, seen)
        console.print(table(scraper, seen))
        return
    with Live(table(scraper, seen), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            await asyncio.sleep(interval)
            try:
                await look(scraper, seen)
                live.update(table(scraper, seen), refresh=True)
            except RequestError as error:
                live.update(Text(str(error), style="bold"), refresh=True)


async def look(scraper: Scraper, seen: deque[tuple[float, Samples]]) -> None:
    """One look more; those older than the window are forgotten."""
    try:
        seen.append((time.monotonic(), await scraper.read()))
    except (OSError, TimeoutError, HTTPError) as error:
        raise RequestError(f"{scraper.address}/metrics does not answer: {error}") from None
    while len(seen) > 2 and seen[-1][0] - seen[0][0] > WINDOW:
        seen.popleft()
