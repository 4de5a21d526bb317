"""Starting an engine and showing what comes out of it: what `generate` and `chat` share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verifypd.cli.terminal import emit
from verifypd.config import EngineConfig

if TYPE_CHECKING:
    from verifypd.engine.llm import LLM
    from verifypd.request import CompletionOutput, RequestOutput


@dataclass
class Totals:
    """What a run came to."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # by passes that carried drafts
    spans: int = 0
    first: list[float] = field(default_factory=list)  # s to the first token, by request
    each: list[float] = field(default_factory=list)  # s a token after it, by request

    def add(self, output: RequestOutput) -> None:
        """Count one finished request."""
        self.tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self.drafted += output.metrics.drafted
        self.accepted += output.metrics.accepted
        self.emitted += output.metrics.span_emitted
        self.spans += output.metrics.spans
        metrics = output.metrics
        if metrics.first_token_time is None or metrics.finished_time is None:
            return
        self.first.append(metrics.first_token_time - metrics.arrival_time)
        longest = max(len(choice.token_ids) for choice in output.outputs)
        if longest > 1:
            self.each.append((metrics.finished_time - metrics.first_token_time) / (longest - 1))

    def latencies(self) -> dict[str, dict[str, float]]:
        """Median and 95th percentile over the requests of a run of several, ms."""
        named = {"ttft_ms": self.first, "tpot_ms": self.each}
        return {
            name: {f"p{share}": round(1e3 * percentile(seconds, share), 3) for share in (50, 95)}
            for name, seconds in named.items()
            if len(seconds) > 1
        }

    def summary(self) -> dict[str, Any]:
        """The figures by name; None where nothing was drafted or no pass ran."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens / self.seconds, 2) if self.seconds else None,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": round(self.accepted / self.drafted, 4) if self.drafted else None,
            "mean_accepted_length": round(self.emitted / self.spans, 4) if self.spans else None,
            **self.latencies(),
        }

    def line(self) -> str:
        """The figures on one line."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        parts = [f"{self.tokens} tokens in {self.seconds:.2f} s", f"{rate:.1f} tok/s"]
        if self.drafted:
            parts.append(f"acceptance {self.accepted / self.drafted:.2f} ({self.accepted} of {self.drafted} drafted)")
        else:
            parts.append("nothing drafted")
        if self.spans:
            parts.append(f"mean accepted length {self.emitted / self.spans:.2f}")
        for name, found in self.latencies().items():
            what = name.removesuffix("_ms").upper()
            parts.append(f"{what} p50 {found['p50']:.0f} ms p95 {found['p95']:.0f} ms")
        return ", ".join(parts)


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that is no less than `share` per cent of them."""
    return sorted(values)[math.ceil(share / 100 * len(values)) - 1]


def load(settings: dict[str, Any]) -> LLM:
    """Start an engine. Everything slow, torch included, is imported here."""
    EngineConfig.from_kwargs(**settings)  # a bad setting is refused before torch is loaded
    from verifypd.engine.llm import LLM

    return LLM(**{"model": EngineConfig.model} | settings)


def show_text(choice: CompletionOutput) -> str:
    """What is printed of a choice: its text."""
    return choice.text


def show_ids(choice: CompletionOutput) -> str:
    """What is printed of a choice with --token-ids."""
    return ",".join(map(str, choice.token_ids))


def print_stream(
    stream: Iterable[RequestOutput],
    show: Callable[[CompletionOutput], str] = show_text,
    stop: threading.Event | None = None,
) -> RequestOutput | None:
    """Print the text of a stream as it grows, and a final newline; returns the last output."""
    shown = 0
    last: RequestOutput | None = None
    try:
        for last in stream:
            text = show(last.outputs[0])
            if len(text) > shown:
                emit(text[shown:])
                shown = len(text)
            if stop is not None and stop.is_set():
                break
    finally:
        close = getattr(stream, "close", None)  # a generator aborts its request when it is closed
        if close is not None:
            close()
    emit("\n")
    return last
