"""Arms of a comparison: an architecture, for which a server is started, or the URL of one that runs.

Knows processes and HTTP; nothing of pages, and of benchmarks only what an arm is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifypd.bench.arms import pairs_of
from verifypd.bench.client import HTTPError
from verifypd.bench.dummy import parsed
from verifypd.bench.endpoint import Endpoint
from verifypd.bench.play import Answer, Drafts
from verifypd.bench.provenance import relative
from verifypd.bench.workload import Arrival
from verifypd.config import ARCHITECTURES, EngineConfig
from verifypd.errors import ConfigError
from verifypd.metrics.stats import percentile
from verifypd.watch.scrape import Scraper

READY = " at http"  # in the line that a server prints when it serves
LOOK = 1.0  # s between two looks at the metrics of a server that has no dashboard of ours
AGAIN = 2.0  # s before a server that does not answer is looked at again
TOKENS = "vllm:generation_tokens_total"
RATE = 2.0  # s over which the tokens of now are counted
# A server ends when this process does, however that ends.
SERVE = (
    "import sys; from verifypd.server.lifeline import die_with; die_with(int(sys.argv[1]));"
    " from verifypd.cli import main; sys.exit(main(sys.argv[2:]))"
)


@dataclass(slots=True)
class Tally:
    """What clients have seen of an arm's run so far. Times in s of the monotonic clock."""

    begun: float = 0.0
    ended: float | None = 0.0
    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)  # s to the first output
    each: list[float] = field(default_factory=list)  # s a token after it
    recent: list[tuple[float, int]] = field(
        default_factory=list
    )  # when outputs came, and tokens of each as far as known
    counted: list[tuple[float, float]] = field(default_factory=list)  # when the server told its tokens, and how many
    before: float = 0.0  # tokens of engines that died meanwhile, which the server counts no more

    @property
    def running(self) -> bool:
        """Whether a run goes on."""
        return self.ended is None

    def seconds(self, now: float) -> float:
        """Of the run."""
        return (now if self.ended is None else self.ended) - self.begun

    def take(self, now: float, tokens: float) -> None:
        """The server tells how many tokens it has written; less than before where its engine was started again."""
        last = self.counted[-1][1] if self.counted else 0.0
        if self.before + tokens < last:
            self.before = last
        self.counted.append((now, self.before + tokens))

    def rate(self, now: float) -> float:
        """Tokens a second, of the last ones: as the server counts them, for an output may hold many.

        Of a server that does not count, outputs stand for tokens until a request has ended.
        """
        late = [each for each in self.counted if now - each[0] <= RATE + LOOK]
        if len(late) > 1:
            (then, before), (last, after) = late[0], late[-1]
            return (after - before) / (last - then)
        self.recent = [each for each in self.recent if now - each[0] <= RATE]
        return sum(count for _, count in self.recent) / max(0.1, min(RATE, now - self.begun))

    def mean(self, now: float) -> float:
        """Tokens a second of the whole run so far."""
        tokens = self.counted[-1][1] - self.counted[0][1] if self.running and self.counted else self.tokens
        return tokens / max(self.seconds(now), 1e-3)

    def point(self, now: float) -> dict[str, float | None]:
        """For the charts."""
        return {
            "x": round(self.seconds(now), 2),
            "tokens": self.rate(now),
            "flight": self.sent - self.done - self.failed,
            "ttft": 1e3 * percentile(self.firsts[-50:], 0.5) if self.firsts else None,
            "tpot": 1e3 * percentile(self.each[-50:], 0.5) if self.each else None,
        }


class _Told:
    """Passes on what came, and counts it."""

    def __init__(self, answer: Answer, tally: Tally) -> None:
        self.answer, self.tally = answer, tally
        self.begun = time.monotonic()
        self.first = self.last = 0.0
        self.tokens = 0

    def came(self, tokens: int) -> None:
        """An output, now."""
        now, tally = time.monotonic(), self.tally
        if not self.first:
            self.first = now
            tally.firsts.append(now - self.begun)
        self.last = now
        self.tokens += max(1, tokens)
        tally.tokens += max(1, tokens)
        tally.recent.append((now, max(1, tokens)))
        self.answer.came(tokens)

    def ended(self, tokens: int, prompt_tokens: int) -> None:
        """It is whole."""
        count = tokens or self.tokens
        self.tally.tokens += count - self.tokens
        if count > 1 and self.last > self.first:
            self.tally.each.append((self.last - self.first) / (count - 1))
        self.answer.ended(tokens, prompt_tokens)


class Shown:
    """An arm whose runs are told while they go on. As an arm of a benchmark it is what it holds."""

    def __init__(self, arm: Server | Started) -> None:
        self.arm = arm
        self.tally = Tally()

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.arm.name

    @property
    def spec(self) -> dict[str, Any]:
        """What tells it from another arm."""
        return self.arm.spec

    async def start(self) -> dict[str, Any]:
        """Be ready."""
        return await self.arm.start()

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        """Answer one request, and count what comes."""
        tally = self.tally if self.tally.running else Tally()  # a warm-up is no run
        tally.sent += 1
        try:
            await self.arm.ask(arrival, seed, _Told(answer, tally))
        except BaseException:
            tally.failed += 1
            raise
        tally.done += 1

    async def drafts(self) -> Drafts | None:
        """What became of drafts."""
        return await self.arm.drafts()

    async def close(self) -> None:
        """Free what it holds."""
        await self.arm.close()

    def count(self, metrics: dict[str, float]) -> None:
        """What its server counts, as it tells it."""
        if self.tally.running and TOKENS in metrics:
            self.tally.take(time.monotonic(), metrics[TOKENS])

    async def follow(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Tell its frames for the dashboard, as they come, until cancelled."""
        while True:
            address, key = self.arm.where
            if address is not None:
                with contextlib.suppress(OSError, TimeoutError, HTTPError):  # gone: what it said is still shown
                    await self._frames(Scraper(address, key), tell)
            await asyncio.sleep(AGAIN if address else 0.1)

    async def _frames(self, scraper: Scraper, tell: Callable[[dict[str, Any]], None]) -> None:
        """Those of a dashboard of ours; of another server, what its metrics say."""
        try:
            async for events in scraper.client.events("/dashboard/events", None):
                tell(events[-1])
            return
        except HTTPError:
            pass
        while True:
            tell(await scraper.frame(self.name))
            await asyncio.sleep(LOOK)


class Server(Endpoint):
    """A server that runs."""

    def __init__(self, url: str, key: str | None, **settings: Any) -> None:
        super().__init__(url, key=key, **settings)
        self._key = key

    @property
    def where(self) -> tuple[str | None, str | None]:
        """Its address and key."""
        return str(self.address), self._key


class Started:
    """A server of ours under one architecture, started for the comparison and stopped after it."""

    def __init__(self, name: str, settings: dict[str, Any], names: dict[str, str], **asking: Any) -> None:
        """settings: the engine's. names: of each in a settings file. asking: as an Endpoint has it."""
        EngineConfig.from_kwargs(**settings)
        self.name = name
        self.settings, self._names, self._asking = settings, names, asking
        self._process: subprocess.Popen[str] | None = None
        self._server: Server | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """Its settings; no secrets."""
        shown = {name: value for name, value in self.settings.items() if name != "hf_token"}
        return {"settings": {k: relative(v) if isinstance(v, str) else v for k, v in shown.items()}}

    @property
    def where(self) -> tuple[str | None, str | None]:
        """Its address and key, once it serves."""
        return self._server.where if self._server else (None, None)

    async def start(self) -> dict[str, Any]:
        """Start the server, and wait until it serves."""
        self._folder = tempfile.TemporaryDirectory(prefix="verifypd-compare-")
        file, log = Path(self._folder.name) / "settings.yaml", Path(self._folder.name) / "log"
        file.write_text(json.dumps({self._names[name]: value for name, value in self.settings.items()}))
        file.chmod(0o600)
        key = secrets.token_urlsafe(24)
        environment = {name: value for name, value in os.environ.items() if name != "VERIFYPD_ADMIN_KEY"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(os.getpid()), "serve", "--port", "0", "--config", str(file)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment | {"VERIFYPD_API_KEY": key},
            )
        address = await asyncio.to_thread(self._address)
        if address is None:
            said = " ".join(log.read_text(errors="replace").split())[-300:]
            raise ConfigError(f"the server of {self.name} did not start: {said}")
        self._server = Server(address, key, name=self.name, **self._asking)
        return {**await self._server.start(), "arch": self.settings["arch"]}

    def _address(self) -> str | None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if READY in line:
                return line.split()[-1]
        return None

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        """Answer one request."""
        assert self._server is not None
        await self._server.ask(arrival, seed, answer)

    async def drafts(self) -> Drafts | None:
        """What became of drafts."""
        return await self._server.drafts() if self._server else None

    async def close(self) -> None:
        """Stop the server."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)
            assert self._process.stdout is not None
            self._process.stdout.close()
        if self._folder is not None:
            self._folder.cleanup()


def parse(
    texts: Sequence[str], shared: dict[str, Any], names: dict[str, str], key: str | None, **asking: Any
) -> list[Shown]:
    """Arms as they are named on a command line: `pdv`, `pdv:max_draft=4`, `http://…`, `vllm=http://…`.

    shared: the engine's settings that all that are started have.
    """
    return [Shown(_parse(text, shared, names, key, **asking)) for text in texts]


def _parse(
    text: str, shared: dict[str, Any], names: dict[str, str], key: str | None, **asking: Any
) -> Server | Started:
    if "://" in text:
        given, _, url = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
        return Server(url, key, name=given or None, **asking)
    arch, _, own = text.partition(":")
    if arch not in ARCHITECTURES:
        raise ConfigError(f"{text!r} is no URL and no architecture; choose from {', '.join(ARCHITECTURES)}")
    settings = {**shared, "arch": arch, **parsed(pairs_of(own, text))}
    return Started(text, settings, names, **asking)
