"""What an operator looks at first, from the samples of /metrics then and now. Pure: numbers in, words out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verifypd.watch.scrape import DRAFTS, Samples, by_label

DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
ENDED = 'verifypd:calls_total{outcome="ok"}'
LATENCIES = {
    "first token": "vllm:time_to_first_token_seconds",
    "per token": "vllm:request_time_per_output_token_seconds",
    "gap": "verifypd:inter_token_latency_seconds",
    "whole request": "vllm:e2e_request_latency_seconds",
}
SHARES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: what it is, its value in words, and what it means."""

    name: str
    value: str
    note: str = ""


def grown(now: Samples, then: Samples, name: str) -> float:
    """How much a counter grew; one that is smaller began anew."""
    before = then.get(name, 0.0)
    after = now.get(name, 0.0)
    return after - before if after >= before else after


def percentiles(now: Samples, then: Samples, name: str, shares: Sequence[float] = SHARES) -> list[float | None]:
    """Of a histogram, s: on a straight line within a bucket, as Prometheus does; None without anything."""
    old = by_label(then, f"{name}_bucket", "le")
    found = sorted(
        (math.inf if le == "+Inf" else float(le), max(0.0, count - old.get(le, 0.0)))
        for le, count in by_label(now, f"{name}_bucket", "le").items()
    )
    total = found[-1][1] if found else 0.0
    return [_within(found, share * total) if total else None for share in shares]


def _within(buckets: Sequence[tuple[float, float]], wanted: float) -> float:
    low, before = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > before:
            return low if math.isinf(bound) else low + (wanted - before) / (count - before) * (bound - low)
        low, before = (low if math.isinf(bound) else bound), count
    return low


def lines(now: Samples, then: Samples, seconds: float) -> list[Line]:
    """The figures of the last `seconds`. What a server does not say is left out."""

    def rate(name: str) -> float:
        return grown(now, then, name) / seconds

    made = [
        Line("tokens written", f"{rate('vllm:generation_tokens_total'):.1f} /s"),
        Line("prompt tokens", f"{rate('vllm:prompt_tokens_total'):.1f} /s"),
        Line("requests ended", f"{rate(ENDED):.2f} /s"),
        Line(
            "running, waiting",
            f"{now.get('vllm:num_requests_running', 0):.0f}, {now.get('vllm:num_requests_waiting', 0):.0f}",
        ),
    ]
    for what, name in LATENCIES.items():
        found = percentiles(now, then, name)
        if found[0] is not None:
            made.append(Line(what, " / ".join(_ms(each) for each in found), "p50 / p95 / p99"))
    if "vllm:kv_cache_usage_perc" in now:
        made.append(Line("KV cache in use", f"{100 * now['vllm:kv_cache_usage_perc']:.0f} %"))
    asked, hits = (grown(now, then, f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    if asked:
        made.append(Line("prefix cache", f"{100 * hits / asked:.0f} %", "of prompt tokens found"))
    return made + _drafts(now, then) + _ours(now)


def _drafts(now: Samples, then: Samples) -> list[Line]:
    if DRAFTS not in now:
        return []
    drafts, drafted, accepted = (grown(now, then, name) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if not drafts:
        return [Line("drafts", "none now")]
    return [
        Line("draft length", f"{drafted / drafts:.2f}", f"{accepted / drafts:.2f} of it stand"),
        Line("drafts accepted", f"{100 * accepted / max(1.0, drafted):.0f} %"),
    ]


def _ours(now: Samples) -> list[Line]:
    made = [
        Line("architecture", key.partition('architecture="')[2].partition('"')[0], f"policy {policy}")
        for key, value in now.items()
        if key.startswith("verifypd:architecture{") and value
        for policy in [key.partition('policy="')[2].partition('"')[0]]
    ]
    if "verifypd:gpu_utilization" in now:
        made.append(Line("GPU busy", f"{100 * now['verifypd:gpu_utilization']:.0f} %"))
    return made


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return (
        f"{seconds:.1f} s"
        if seconds >= 10
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 0.01
        else f"{1e3 * seconds:.1f} ms"
    )
