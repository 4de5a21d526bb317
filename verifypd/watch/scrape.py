"""Reads /metrics of a server, ours or vLLM's, into samples by name; vLLM's get the names that ours has. Knows HTTP."""

from __future__ import annotations

import re
import time
from typing import Any

from verifypd.bench.client import Address, Client

SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COMMON = ("model_name", "engine")  # that every sample has
DRAFTS = "vllm:spec_decode_num_drafts_total"
PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PATIENCE = 10.0  # s

Samples = dict[str, float]


def samples(text: str) -> Samples:
    """Samples by name and labels, without the labels that all have; those of several engines are added up."""
    found: Samples = {}
    for name, labels, value in SAMPLE.findall(text):
        own = sorted((label, text) for label, text in LABEL.findall(labels) if label not in COMMON)
        if name.endswith("_created"):
            continue
        inside = ",".join(f'{label}="{text}"' for label, text in own)
        key = f"{name}{{{inside}}}" if inside else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def by_label(found: Samples, name: str, label: str) -> Samples:
    """Samples of a family by the value of one label."""
    mark = f'{label}="'
    return {
        key.partition(mark)[2].partition('"')[0]: value
        for key, value in found.items()
        if key.startswith(f"{name}{{") and mark in key
    }


def as_ours(found: Samples) -> Samples:
    """The same, with our names for what vLLM says under others."""
    made = dict(found)
    if 'verifypd:calls_total{outcome="ok"}' not in found:
        made['verifypd:calls_total{outcome="ok"}'] = sum(
            by_label(found, "vllm:request_success_total", "finished_reason").values()
        )
    if DRAFTS in found:  # a draft of vLLM's has the same length every time
        for position in by_label(found, PLACES, "position"):
            made.setdefault(f'verifypd:draft_tokens_per_pos_total{{position="{position}"}}', found[DRAFTS])
    for key, value in found.items():
        if key.startswith("vllm:inter_token_latency_seconds"):
            made.setdefault("verifypd:" + key.removeprefix("vllm:"), value)
    if "vllm:kv_cache_usage_perc" not in found and "vllm:gpu_cache_usage_perc" in found:
        made["vllm:kv_cache_usage_perc"] = found["vllm:gpu_cache_usage_perc"]
    return made


class Scraper:
    """One server's figures, whenever they are asked for."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.address = Address.parse(url)
        self.client = Client(self.address, key)

    async def read(self) -> Samples:
        """What it says now. Raises OSError, TimeoutError or HTTPError where it does not."""
        return as_ours(samples((await self.client.get("/metrics", PATIENCE)).decode("utf-8", "replace")))

    async def frame(self, name: str) -> dict[str, Any]:
        """A frame of the dashboard: all its figures, and nothing of what only our engine tells."""
        metrics = await self.read()
        ready = metrics.get("verifypd:engine_up", 1.0) > 0.0  # others do not say
        server = {"version": None, "model": name, "ready": ready, "epoch": 1, "drafter": metrics.get(DRAFTS)}
        return {
            "time": time.monotonic(),
            "server": server,
            "metrics": metrics,
            "live": {},
            "policy": "",
            "architecture": "",
        }
