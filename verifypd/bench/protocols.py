"""The original's protocols A to D as data: which arms, loads and pairs, and what it published beside them.

Knows traffic and names; nothing of engines. A protocol can be run smaller than it was: its size says how much, and so
does every report of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifypd.bench.arrivals import Process, make
from verifypd.bench.campaign import Scenario
from verifypd.bench.pairs import OWN, Pair
from verifypd.bench.sources import Source, fixed, source
from verifypd.bench.workload import Workload, mixed
from verifypd.errors import ConfigError

PROMPT = 64  # tokens, of random ones; the original does not say
DRAFTS = 4  # tokens of every draft, as the original has them


@dataclass(frozen=True, slots=True)
class Size:
    """How much smaller than the original's a run is."""

    name: str
    factor: int  # requests come so many times as fast and a run is cut off so many times as soon; outputs are as short
    loads: int  # so many of the protocol's
    seeds: int

    @property
    def note(self) -> str:
        """What a reader must know of it; nothing at full size."""
        if self.factor == 1:
            return ""
        return (
            f"scaled ({self.name}): times and outputs / {self.factor}, outputs of {LEAST_OUTPUT} at least, fewer loads"
        )


SIZES = {
    "full": Size("full", 1, 100, 3),
    "short": Size("short", 5, 2, 3),
    "quick": Size("quick", 10, 1, 2),
}
LEAST_OUTPUT = 8  # tokens


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a protocol."""

    label: str
    process: Process
    batch: int
    count: int | None
    seconds: float | None = None  # in which requests arrive
    cut: float | None = None  # s, when it ends


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of the original's."""

    letter: str
    command: str
    title: str
    arms: tuple[str, ...]
    reference: str  # the arm that others are held against, which runs twice
    pairs: tuple[str, ...]
    loads: tuple[int, ...]  # C, or n
    output: int  # tokens
    load: Callable[[int, Size, int | None], Load]
    few: tuple[int, ...]  # the loads of smaller sizes, the most telling first
    claims: dict[str, Any]
    own_pairs: tuple[str, ...] = (OWN,)  # where there is no GPU

    def packed(self) -> dict[str, Any]:
        """What a report says of it."""
        return {"letter": self.letter, "title": self.title, "claims": self.claims}


def _a(concurrency: int, size: Size, count: int | None) -> Load:
    process = Process(rate=0.05 * concurrency * size.factor)
    return Load(f"C={concurrency}", process, concurrency, count, None if count else 30 / size.factor, 60 / size.factor)


def _b(count: int, _size: Size, _given: int | None) -> Load:
    return Load(f"n={count}", Process(), 4, count)


def _c(count: int, size: Size, _given: int | None) -> Load:
    return Load(f"n={count}", Process(rate=size.factor * (2.0 if count <= 5 else 5.0)), 4, count)


def _d(concurrency: int, size: Size, count: int | None) -> Load:
    return Load(f"C={concurrency}", Process(rate=float(size.factor * concurrency)), 6, count or 10)


LLAMA = "tinyllama-1.1b:llama-2-7b"
THREE = ("baseline", "plain", "pd", "pdv whole", "pdv pipelined", "auto")
VERIFY = tuple(f"pdv verify {count}" for count in (1, 2, 4, 8))
PDV = ("pdv pipelined", *VERIFY, "pdv", "pdv whole")  # those that pipeline soonest first
PROTOCOLS = {
    each.command: each
    for each in (
        Protocol(
            "A", "sweep", "concurrency sweep: Poisson arrivals at 0.05 C/s, batch C, 20 new tokens",
            ("pd", "plain", "pdv", "pdv verify 1", "auto"), "pd",
            ("tinyllama-1.1b:tinyllama-1.1b", LLAMA, "tinyllama-1.1b:codellama-34b"),
            (1, 2, 4, 6, 8, 10, 12, 16, 32, 64, 72, 84, 96, 128), 20, _a, (8, 32, 1),
            {"tok/s of PD at its peak": {"C=16": 13.3}, "tok/s of PDV at its peak": {"C=64": 12.5},
             "tok/s as it counted, PD and PDV": {"C=128": [0.35, 11.8]},
             "mean latency, s, PD and PDV": {"C=32": [32.6, 25.8], "C=64": [31.3, 28.4], "C=96": [44.6, 36.5],
                                             "C=128": [76.3, 46.2]}},
        ),
        Protocol(
            "B", "three-way", "three-way: all requests at once, batch 4, 100 new tokens",
            THREE, "baseline", (LLAMA,), (1, 5, 20, 50), 100, _b, (5, 1, 20),
            {"P95, s, Baseline, PD and PDV": {"n=1": [6.70, 6.42, 6.34], "n=5": [33.1, 33.9, 35.6],
                                              "n=20": [113.6, 123.2, 95.7], "n=50": [361.7, 368.2, 235.7]},
             "tok/s of PDV over Baseline": {"n=20": 1.58, "n=50": 1.47}},
        ),
        Protocol(
            "C", "models", "model comparison: Poisson arrivals, batch 4, 100 new tokens",
            ("baseline", "plain", "pdv whole", "pdv pipelined"), "baseline",
            (LLAMA, "qwen2-1.5b:qwen2-7b", "gemma-2b:gemma-7b"), (5, 20), 100, _c, (5, 20),
            {"P95, s, Baseline and PDV": {
                f"{LLAMA} n=5": [42.3, 15.2], f"{LLAMA} n=20": [168.4, 46.2],
                "qwen2-1.5b:qwen2-7b n=5": [33.8, 14.4], "qwen2-1.5b:qwen2-7b n=20": [142.4, 45.3],
                "gemma-2b:gemma-7b n=5": [25.2, 8.8], "gemma-2b:gemma-7b n=20": [137.4, 40.4]},
             "tok/s of PDV over Baseline": {
                 f"{LLAMA} n=5": 2.68, f"{LLAMA} n=20": 3.53, "qwen2-1.5b:qwen2-7b n=5": 2.24,
                 "qwen2-1.5b:qwen2-7b n=20": 3.03, "gemma-2b:gemma-7b n=5": 2.37, "gemma-2b:gemma-7b n=20": 3.26}},
            (LLAMA, "qwen2-1.5b:qwen2-7b", "gemma-2b:gemma-7b"),
        ),
        Protocol(
            "D", "comprehensive", "comprehensive: 10 requests at C/s, batch 6, 100 new tokens",
            THREE, "baseline", (LLAMA,), (3, 5, 10), 100, _d, (10, 3),
            {"tok/s, Baseline, PD and PDV": {"C=3": [11.5, 47.0, 43.2], "C=5": [12.4, 47.8, 48.2],
                                             "C=10": [13.0, 49.0, 56.4]},
             "P95, s, Baseline, PD and PDV": {"C=3": [82.0, 15.4, 18.1], "C=5": [76.7, 15.6, 16.0],
                                              "C=10": [73.6, 16.8, 16.1]}},
        ),
    )
}  # fmt: skip
MIXED = Protocol(
    "E", "mixed", "mixed traffic: chat-like lengths, Poisson arrivals, bursts of long prompts",
    ("plain", "pd", "pdv", "pdv verify 4", "auto"), "plain", (LLAMA,), (8, 16), 0, _a, (2,), {},
)  # fmt: skip
MIXED_BATCH = 64
MIXED_SECONDS, FEW_SECONDS = 20.0, 6.0  # in which requests arrive, at full size and at the others
MIXED_SCALE = 32  # lengths are divided by this at the other sizes
MIXED_LONGEST = 4000 + 512  # prompt and output, tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is run of a protocol."""

    protocol: Protocol
    size: Size
    pairs: tuple[Pair, ...]
    loads: tuple[int, ...]
    count: int | None = None  # requests of a point, where the protocol leaves it open
    output: int | None = None
    duration: float | None = None  # s in which requests arrive (A)
    real_source: str = "prompts"  # where models are real

    @property
    def tokens(self) -> int:
        """Of every output."""
        if self.output is not None:
            return self.output
        return max(LEAST_OUTPUT, self.protocol.output // self.size.factor)

    @property
    def note(self) -> str:
        """What stands in every table and plot."""
        own = [load.seconds for load in self.points() if load.seconds]
        shorter = f"requests arrive for {self.duration:g} s" if self.duration and own else ""
        return note_of(self.protocol, self.pairs, self.size.note, shorter)

    @property
    def about(self) -> dict[str, Any]:
        """What a report says of it."""
        return self.protocol.packed() | {"size": self.size.name, "output_tokens": self.tokens}

    @property
    def longest(self) -> int:
        """Tokens of a prompt of random tokens and its output."""
        return PROMPT + self.tokens

    def points(self) -> list[Load]:
        """Its loads."""
        found = [self.protocol.load(each, self.size, self.count) for each in self.loads]
        return [replace(each, seconds=self.duration) if self.duration and each.seconds else each for each in found]

    def most(self) -> int:
        """Requests that hold a slot at once at most."""
        return max(max(-(-6 * load.batch // 5), load.count or 0) for load in self.points())

    def scenarios(self, seeds: Sequence[int]) -> list[Scenario]:
        """One for each pair and load."""
        found = []
        for pair in self.pairs:
            prompts = fixed(f"{PROMPT}x{self.tokens}") if pair.dummy else source(self.real_source).limited(self.tokens)
            for load in self.points():
                made = tuple(_workload(prompts, load, seed) for seed in seeds)
                settings = {**pair.packed(), "batch": load.batch}
                name = f"{self.protocol.letter} {load.label}"
                name += f", {pair.label}" if len(self.pairs) > 1 or pair.dummy else ""
                found.append(Scenario(name, made, load.cut, settings, pair.label, load.label, pair.name))
        return found


@dataclass(frozen=True, slots=True)
class Mixed:
    """Protocol E on pairs of models."""

    size: Size
    pairs: tuple[Pair, ...]
    rates: tuple[float, ...]
    seconds: float
    protocol: Protocol = MIXED

    @property
    def scale(self) -> int:
        """All lengths are divided by it."""
        return 1 if self.size.factor == 1 else MIXED_SCALE

    @property
    def note(self) -> str:
        """What stands in every table and plot."""
        return note_of(self.protocol, self.pairs, mixed_note(self.scale, self.seconds))

    @property
    def about(self) -> dict[str, Any]:
        """What a report says of it."""
        return self.protocol.packed() | {"size": self.size.name, "seconds": self.seconds}

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its output."""
        return MIXED_LONGEST // self.scale + 2

    def most(self) -> int:
        """Requests that hold a slot at once at most."""
        return -(-6 * MIXED_BATCH // 5)

    def scenarios(self, seeds: Sequence[int]) -> list[Scenario]:
        """One for each pair and rate."""
        found = []
        scaled = "" if self.scale == 1 else f", lengths / {self.scale}"
        for pair in self.pairs:
            settings = {**pair.packed(), "batch": MIXED_BATCH, "requests": MIXED_BATCH}
            for rate in self.rates:
                made = tuple(mixed(rate, self.seconds, seed).scaled(self.scale) for seed in seeds)
                if not all(workload.arrivals for workload in made):
                    raise ConfigError("no request arrives in that time: raise --duration or --rate")
                name = f"E {rate:g}/s{scaled}, {pair.label}"
                found.append(Scenario(name, made, None, settings, pair.label, f"{rate:g}/s", pair.name))
        return found


def mixed_note(scale: int, seconds: float | None) -> str:
    """What a reader must know of mixed traffic; nothing where it is the protocol's. seconds: None where a file says."""
    scaled = f"scaled: lengths / {scale}" if scale > 1 else ""
    other = "" if seconds in (None, MIXED_SECONDS) else f"requests arrive for {seconds:g} s"
    return "; ".join(filter(None, (scaled, other)))


def note_of(protocol: Protocol, pairs: Sequence[Pair], *more: str) -> str:
    """What stands in every table and plot of a protocol on some pairs."""
    parts = [f"protocol {protocol.letter}", *dict.fromkeys(pair.note for pair in pairs), *more]
    return "; ".join(part for part in parts if part)


def _workload(prompts: Source, load: Load, seed: int) -> Workload:
    """A load's requests from a seed; where none would arrive in time, the first comes at the end of it."""
    try:
        return make(prompts, load.process, seed, count=load.count, seconds=load.seconds)
    except ConfigError:
        if load.seconds is None:
            raise
        one = make(prompts, load.process, seed, count=1)
        return replace(one, arrivals=tuple(replace(each, at=min(each.at, load.seconds)) for each in one.arrivals))


def wanted(protocol: Protocol, size: Size, pairs: Sequence[Pair], loads: Sequence[int] = (), **more: Any) -> Wanted:
    """A protocol at a size; loads: other than its own."""
    own = protocol.loads if size.name == "full" else tuple(sorted(protocol.few[: size.loads]))
    return Wanted(protocol, size, tuple(pairs), tuple(loads) or own, **more)


def wanted_mixed(size: Size, pairs: Sequence[Pair], rates: Sequence[float] = (), seconds: float | None = None) -> Mixed:
    """Protocol E at a size; rates and seconds: other than its own."""
    own = MIXED.loads if size.name == "full" else MIXED.few
    full = MIXED_SECONDS if size.name == "full" else FEW_SECONDS
    return Mixed(size, tuple(pairs), tuple(rates) or own, seconds or full)
