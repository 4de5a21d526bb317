"""`verifypd top`: the essentials of ours and of a server with vLLM's metrics, from two looks at them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from verifypd.bench.client import Address, Client
from verifypd.cli import main
from verifypd.watch.essentials import lines, percentiles
from verifypd.watch.scrape import Samples, Scraper, as_ours, by_label, samples

TEXT = r"""# HELP vllm:x Something.
# TYPE vllm:x counter
vllm:generation_tokens_total{engine="0",model_name="a,b{\"}"} 10.0
vllm:generation_tokens_total{engine="1",model_name="a,b{\"}"} 5.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:request_success_created{engine="0"} 1e9
vllm:spec_decode_num_drafts_total{engine="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:inter_token_latency_seconds_bucket{le="0.1"} 2.0
vllm:gpu_cache_usage_perc 0.5
"""


def test_samples_are_read_and_named_as_ours() -> None:
    found = samples(TEXT)
    assert found["vllm:generation_tokens_total"] == 15 and not any("created" in name for name in found)
    assert by_label(found, "vllm:request_success_total", "finished_reason") == {"stop": 3.0, "length": 4.0}
    ours = as_ours(found)
    assert ours['verifypd:calls_total{outcome="ok"}'] == 7
    assert ours['verifypd:draft_tokens_per_pos_total{position="0"}'] == 7
    assert ours['verifypd:inter_token_latency_seconds_bucket{le="0.1"}'] == 2
    assert ours["vllm:kv_cache_usage_perc"] == 0.5
    assert as_ours({'verifypd:calls_total{outcome="ok"}': 2.0}) == {'verifypd:calls_total{outcome="ok"}': 2.0}


@pytest.mark.parametrize(
    ("told", "ready"), [({}, True), ({"verifypd:engine_up": 1.0}, True), ({"verifypd:engine_up": 0.0}, False)]
)
def test_a_server_without_its_engine_is_not_ready(told: Samples, ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(self: Scraper) -> Samples:
        return told

    monkeypatch.setattr(Scraper, "read", read)
    assert asyncio.run(Scraper("http://127.0.0.1:1").frame("m"))["server"]["ready"] is ready


def test_percentiles_are_prometheus_s() -> None:
    def bucket(le: str) -> str:
        return f'h_bucket{{le="{le}"}}'

    now = {bucket("1.0"): 10.0, bucket("2.0"): 30.0, bucket("+Inf"): 40.0}
    then = {bucket("1.0"): 10.0, bucket("2.0"): 10.0, bucket("+Inf"): 10.0}
    assert percentiles(now, then, "h", [0.5, 1.0]) == [pytest.approx(1.75), 2.0]
    assert percentiles(then, then, "h") == [None] * 3 and percentiles({}, {}, "h") == [None] * 3


def test_lines_are_of_the_time_between() -> None:
    then = {"vllm:generation_tokens_total": 100.0, "vllm:spec_decode_num_drafts_total": 10.0}
    now: dict[str, float] = {
        "vllm:generation_tokens_total": 300.0,
        "vllm:spec_decode_num_drafts_total": 20.0,
        "vllm:spec_decode_num_draft_tokens_total": 40.0,
        "vllm:spec_decode_num_accepted_tokens_total": 10.0,
        "vllm:num_requests_running": 3.0,
        'verifypd:architecture{architecture="pd",policy="auto"}': 1.0,
    }
    found = {line.name: line for line in lines(now, then, 4.0)}
    assert found["tokens written"].value == "50.0 /s" and found["running, waiting"].value == "3, 0"
    assert (found["draft length"].value, found["drafts accepted"].value) == ("4.00", "25 %")
    assert (found["architecture"].value, found["architecture"].note) == ("pd", "policy auto")
    assert "first token" not in found, "what a server does not say is left out"
    assert {line.name: line.value for line in lines(then, now, 1.0)}["tokens written"] == "100.0 /s", "it began anew"


def test_a_server_with_the_metrics_of_vllm(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = Client(Address.parse(stranger))

    over = threading.Event()

    async def ask() -> None:
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "stream": True}
        while not over.is_set():
            async for _ in client.events("/v1/completions", body):
                pass

    asking = threading.Thread(target=lambda: asyncio.run(ask()))
    asking.start()
    assert main(["top", stranger, "--once", "--interval", "1"]) == 0
    over.set()
    asking.join()
    shown = capsys.readouterr().out
    rows = {
        row[0].strip(): row[1].strip()
        for row in (line.strip("│ ").split("│") for line in shown.splitlines())
        if len(row) > 1
    }
    assert float(rows["tokens written"].removesuffix(" /s")) > 20 and rows["KV cache in use"] == "25 %"
    assert "ms" in rows["first token"]


def test_what_is_no_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:9"]) == 2
    assert "127.0.0.1:9/metrics does not answer" in capsys.readouterr().err
    assert main(["top", "ftp://x"]) == 2 and main(["top", "--interval", "0"]) == 2
