"""What /metrics shows: the engine's figures as it sent them, and what this API saw of its clients. Decides nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from verifypd import __version__
from verifypd.metrics.pauses import CAPTURED, COLLECTED, COMPILED
from verifypd.server.bridge import Bridge
from verifypd.server.calls import Call
from verifypd.server.totals import GAP_BUCKETS, Spread, Targets

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TPOT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)
E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5))
Samples = list[tuple[dict[str, str], float]]


class SpreadHistogram(Histogram):
    """A histogram that takes many observations at once: one at a time costs microseconds a token."""

    def take(self, spread: Spread) -> None:
        """Add what was counted under the same bounds."""
        for bucket, count in zip(self._buckets, spread.counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(spread.seconds)


class ServerMetrics:
    """Counters of this worker; with several workers they are shared through files, and any worker shows the sum."""

    def __init__(self, bridge: Bridge, model: str) -> None:
        self.bridge = bridge
        self._targets: Targets | None = None  # of the engine that was up last
        self.shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        own: Any = None if self.shared else CollectorRegistry()
        self._own = own
        labels, self._labels = ["model_name"], {"model_name": model}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(name, text, labels, buckets=buckets, registry=own)
            return made.labels(**self._labels)

        self.ttft = histogram("vllm:time_to_first_token_seconds", "first token out − request in", TTFT)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "(last − first token) / (tokens − 1) of a request", TPOT
        )
        self.itl: Any = SpreadHistogram(
            "verifypd:inter_token_latency_seconds",
            "between two arrivals of tokens of a choice; a verified draft is one arrival",
            labels,
            buckets=GAP_BUCKETS,
            registry=own,
        ).labels(**self._labels)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "last token out − request in", E2E)
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "prompt tokens of a choice", TOKENS)
        self.output_tokens = histogram("vllm:request_generation_tokens", "tokens written of a choice", TOKENS)
        self.http = Counter("verifypd:http_requests", "answers by path and status", ["path", "status"], registry=own)
        self.outcomes = Counter("verifypd:calls", "calls by how they ended for the client", ["outcome"], registry=own)
        self.refused = Counter(
            "verifypd:refused",
            "generation calls turned away by form, limits or the engine",
            ["code"],
            registry=own,
        )
        self.resumed = Counter("verifypd:calls_taken_up", "calls that went on after an engine had died", registry=own)
        self.good = Counter(
            "verifypd:requests_within_slo", "requests that met both targets; their rate is the goodput", registry=own
        )

    def finished(self, call: Call, outcome: str) -> None:
        """A call has ended."""
        self.outcomes.labels(outcome).inc()
        self.resumed.inc(call.tries > 1 and outcome == "ok")
        self.itl.take(call.gaps)
        if outcome != "ok" or call.first_token is None or call.last_token is None:
            return
        first, last = call.first_token - call.arrival, call.last_token - call.arrival
        self.ttft.observe(first)
        self.e2e.observe(last)
        for choice in call.choices:
            self.prompt_tokens.observe(len(choice.prompt))
            self.output_tokens.observe(choice.tokens)
        longest = max(choice.tokens for choice in call.choices)
        per_token = (last - first) / (longest - 1) if longest > 1 else 0.0
        if longest > 1:
            self.tpot.observe(per_token)
        info = self.bridge.info
        if "slo_ttft" in info:  # else no engine is up
            self._targets = Targets(info["slo_ttft"], info["slo_tpot"])
        own = call.ask.params.slo_ttft, call.ask.params.slo_tpot
        if self._targets and self._targets.met(first, per_token, *own):
            self.good.inc()

    def _registries(self) -> list[CollectorRegistry]:
        """Where everything is read from, by /metrics and by the dashboard alike."""
        registry = CollectorRegistry()
        registry.register(EngineFigures(self.bridge, self._labels["model_name"]))
        if self.shared:
            MultiProcessCollector(registry)
            return [registry]
        return [registry, self._own]

    def text(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return b"".join(map(generate_latest, self._registries()))

    def samples(self) -> dict[str, float]:
        """Everything, by name and labels as /metrics writes them, less the labels that all have and times of birth."""
        common = ("model_name", "engine")
        return {
            sample.name + _written({k: v for k, v in sample.labels.items() if k not in common}): sample.value
            for registry in self._registries()
            for family in registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }


def _written(labels: dict[str, str]) -> str:
    """Labels in order of their names."""
    inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{inside}}}" if inside else ""


class EngineFigures:
    """The engine's last report as metric families."""

    def __init__(self, bridge: Bridge, model: str) -> None:
        self.bridge = bridge
        self.base = {"model_name": model, "engine": "0"}

    def _family(self, kind: Any, name: str, text: str, samples: Samples) -> Metric:
        extra = sorted(samples[0][0]) if samples else []
        family = kind(name, text, labels=[*self.base, *extra])
        for labels, value in samples:
            family.add_metric([*self.base.values(), *(labels[name] for name in extra)], value)
        return family

    def gauge(self, name: str, text: str, *samples: tuple[dict[str, str], float]) -> Metric:
        """A value that goes up and down."""
        return self._family(GaugeMetricFamily, name, text, list(samples))

    def counter(self, name: str, text: str, *samples: tuple[dict[str, str], float]) -> Metric:
        """A value that only grows, until the engine starts again."""
        return self._family(CounterMetricFamily, name, text, list(samples))

    def collect(self) -> Iterable[Metric]:
        """All families."""
        bridge, f = self.bridge, self.bridge.figures
        yield self.gauge("verifypd:build", "which version runs", ({"version": __version__}, 1.0))
        yield self.gauge("verifypd:engine_up", "1: the engine takes requests", ({}, float(bridge.ready)))
        yield self.counter("verifypd:engine_restarts", "times the engine was started again", ({}, bridge.restarts))
        if f:
            yield from self._vllm(f)
            yield from self._speculation(f)
            yield from self._lanes(f)
            yield from self._own(f)
            yield from self._gpu(f.get("gpu", {}))

    def _vllm(self, f: dict[str, Any]) -> Iterable[Metric]:
        """What vLLM has under the same name with the same meaning."""
        yield self.gauge("vllm:num_requests_running", "requests that hold a slot", ({}, f["running"]))
        yield self.gauge("vllm:num_requests_waiting", "requests without a slot", ({}, f["waiting"]))
        pool = f["pools"].get("verifier", {"used": 0, "cached": 0, "free": 1})
        share = pool["used"] / max(1, sum(pool.values()))
        yield self.gauge("vllm:kv_cache_usage_perc", "share of the verifier's KV blocks in use, 0..1", ({}, share))
        yield self.counter("vllm:prompt_tokens", "prompt tokens taken in", ({}, f["prompt_tokens"]))
        yield self.counter("vllm:generation_tokens", "tokens emitted", ({}, f["generation_tokens"]))
        yield self.counter("vllm:num_preemptions", "preemptions", ({}, f["preemptions"]))
        yield self.counter("vllm:prefix_cache_queries", "prompt tokens looked up", ({}, f["prefix_queries"]))
        yield self.counter("vllm:prefix_cache_hits", "prompt tokens found in the cache", ({}, f["prefix_hits"]))
        finished: Samples = [({"finished_reason": reason}, count) for reason, count in sorted(f["finished"].items())]
        yield self.counter("vllm:request_success", "requests by how they ended", *finished)
        yield self.counter("vllm:spec_decode_num_drafts", "verifier spans that carried drafts", ({}, f["drafts"]))
        yield self.counter("vllm:spec_decode_num_draft_tokens", "draft tokens judged", ({}, f["draft_tokens"]))
        yield self.counter(
            "vllm:spec_decode_num_accepted_tokens", "draft tokens that stood", ({}, f["accepted_tokens"])
        )
        positions: Samples = [
            ({"position": position}, count)
            for position, count in sorted(f["accepted_per_position"].items(), key=lambda item: int(item[0]))
        ]
        yield self.counter("vllm:spec_decode_num_accepted_tokens_per_pos", "by place in the draft", *positions)

    def _speculation(self, f: dict[str, Any]) -> Iterable[Metric]:
        def by(label: str, figure: str) -> Samples:
            return [({label: key}, f[figure][key]) for key in sorted(f[figure], key=int)]

        drafted = by("position", "drafted_per_position")
        yield self.counter("verifypd:draft_tokens_per_pos", "draft tokens judged, by place in the draft", *drafted)
        text = "by the request's length, at most so many tokens"
        judged, stood = by("context", "drafted_by_context"), by("context", "accepted_by_context")
        yield self.counter("verifypd:draft_tokens_by_context", f"draft tokens judged, {text}", *judged)
        yield self.counter("verifypd:accepted_tokens_by_context", f"draft tokens that stood, {text}", *stood)
        yield self.counter("verifypd:verdicts", "times a pass gave a request tokens", ({}, f["verdicts"]))
        yield self.counter("verifypd:verdict_tokens", "tokens of those", ({}, f["verdict_tokens"]))
        yield self.counter("verifypd:verifier_passes", "passes of the verifier", ({}, f["passes"]))

    def _lanes(self, f: dict[str, Any]) -> Iterable[Metric]:
        lanes = f["lanes"].items()

        def each(figure: str) -> Samples:
            return [({"lane": name}, lane[figure]) for name, lane in lanes]

        yield self.gauge("verifypd:lane_depth", "requests in the lane", *each("depth"))
        waits: Samples = [
            ({"lane": name, "quantile": f"0.{share}"}, lane[f"wait_p{share}_ms"] / 1e3)
            for name, lane in lanes
            for share in (50, 95, 99)
        ]
        yield self.gauge("verifypd:lane_wait_seconds", "recent waits in the lane", *waits)
        yield self.counter("verifypd:lane_passed", "requests that left the lane", *each("passed"))
        yield self.counter("verifypd:lane_batches", "batches the lane ran", *each("batches"))
        yield self.counter("verifypd:lane_seconds", "time of its batches; by batches: its step time", *each("seconds"))

    def _own(self, f: dict[str, Any]) -> Iterable[Metric]:
        chosen = {"policy": f["policy"], "architecture": f["architecture"]}
        yield self.gauge("verifypd:architecture", "the architecture set, and the one that really plans", (chosen, 1.0))
        ran: Samples = [({"architecture": name}, count) for name, count in sorted(f["architecture_steps"].items())]
        yield self.counter("verifypd:architecture_steps", "steps by the architecture that planned them", *ran)
        yield self.counter("verifypd:architecture_switches", "changes of architecture", ({}, f["switches"]))
        blocks: Samples = [
            ({"pool": name, "state": state}, count)
            for name, pool in f["pools"].items()
            for state, count in pool.items()
        ]
        yield self.gauge("verifypd:kv_blocks", "KV blocks by pool and state", *blocks)
        kept: Samples = [({"dtype": dtype}, size) for dtype, size in f["kv_bytes"].items()]
        yield self.gauge("verifypd:kv_cache_bytes", "the verifier's KV blocks, by what keys and values are in", *kept)
        yield self.counter("verifypd:engine_cpu_seconds", "CPU time of the engine's process", ({}, f["cpu_seconds"]))
        yield self.counter("verifypd:out_of_memory_steps", "steps that ran out of memory", ({}, f["out_of_memory"]))
        yield from self._pauses(f["pauses"])
        calls: Samples = [({"kind": kind}, count) for kind, count in f["memory_taken"].items()]
        text = "calls to the driver for memory since the engine was ready, which may wait for the device"
        if calls:
            yield self.counter("verifypd:memory_calls", text, *calls)
        yield self._histogram("verifypd:step_seconds", "time of an engine step", f["steps"], f["step_seconds"])
        yield self._histogram(
            "verifypd:request_queue_time_seconds", "slot given − queued in the engine", f["queued"], f["queued_seconds"]
        )
        lengths = {int(length): count for length, count in f["draft_lengths"].items()}
        counts = {str(float(k)): sum(c for length, c in lengths.items() if length == k) for k in range(1, 17)}
        counts["inf"] = sum(c for length, c in lengths.items() if length > 16)
        total = float(sum(length * count for length, count in lengths.items()))
        yield self._histogram("verifypd:draft_length", "draft tokens of a span", counts, total)

    def _pauses(self, pauses: dict[str, float]) -> Iterable[Metric]:
        counts: Samples = [({"kind": kind}, pauses[kind]) for kind in (COMPILED, CAPTURED, COLLECTED)]
        text = "kernels compiled, graphs captured and garbage collected since the engine was ready"
        yield self.counter("verifypd:pauses", text, *counts)
        times: Samples = [({"kind": kind}, pauses[f"{kind}_ms"] / 1e3) for kind in (COMPILED, CAPTURED, COLLECTED)]
        yield self.counter("verifypd:pause_seconds", "time of those", *times)

    def _histogram(self, name: str, text: str, counts: dict[str, int], total: float) -> Metric:
        """From counts by upper bound (not cumulative)."""
        family = HistogramMetricFamily(name, text, labels=list(self.base))
        running, buckets = 0, []
        for bound, count in sorted(((float(b), c) for b, c in counts.items())):
            running += count
            buckets.append(("+Inf" if math.isinf(bound) else f"{bound:g}", running))
        family.add_metric(list(self.base.values()), buckets, total)
        return family

    def _gpu(self, gpu: dict[str, float]) -> Iterable[Metric]:
        texts = {
            "gpu_utilization": "share of time a kernel ran, 0..1",
            "sm_activity": "share of SMs with work, 0..1",
            "sm_occupancy": "warps resident on SMs as a share of the most, 0..1",
            "dram_bandwidth": "share of the memory bandwidth in use, 0..1",
            "memory_used_bytes": "device memory in use",
            "memory_total_bytes": "device memory",
            "power_watts": "power drawn",
        }
        for name, text in texts.items():
            if name in gpu:
                yield self.gauge(f"verifypd:{name}", text, ({}, gpu[name]))
