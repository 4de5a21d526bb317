"""What is counted of requests that end: how long they were, and whether they were good by the targets of the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verifypd.server.bridge import Bridge
from verifypd.server.messages import Up
from verifypd.server.metrics import ServerMetrics
from verifypd.server.totals import GAP_BUCKETS, Spread


def call(first: float) -> Any:
    params = SimpleNamespace(slo_ttft=None, slo_tpot=None)
    choices = [SimpleNamespace(tokens=3, prompt=[5] * 7), SimpleNamespace(tokens=2, prompt=[5] * 7)]
    times = {"arrival": 1.0, "first_token": 1.0 + first, "last_token": 1.01 + first}
    return SimpleNamespace(
        tries=1, gaps=Spread(GAP_BUCKETS), choices=choices, ask=SimpleNamespace(params=params), **times
    )


def test_targets_are_the_engines() -> None:
    bridge = Bridge(0, None, 0)
    metrics = ServerMetrics(bridge, "m")

    def good(first: float) -> float:
        before = metrics.good._value.get()
        metrics.finished(call(first), "ok")
        return float(metrics.good._value.get() - before)

    assert good(0.1) == 0, "no engine has said yet what it aims at"
    bridge.up = Up(1, "", {"slo_ttft": 200.0, "slo_tpot": 15.0})
    assert (good(0.1), good(0.3)) == (1, 0)
    bridge.up = None  # it fell; what it had written reaches its client
    assert (good(0.1), good(0.3)) == (1, 0)


def test_lengths_are_counted_by_choice_where_a_call_ended_well() -> None:
    metrics = ServerMetrics(Bridge(0, None, 0), "m")
    metrics.finished(call(0.1), "ok")
    metrics.finished(call(0.1), "client_gone")
    samples = metrics.samples()
    assert samples["vllm:request_prompt_tokens_count"] == samples["vllm:request_generation_tokens_count"] == 2
    assert samples["vllm:request_prompt_tokens_sum"] == 14 and samples["vllm:request_generation_tokens_sum"] == 5
    assert samples['vllm:request_generation_tokens_bucket{le="2.0"}'] == 1
