"""Answers in short, for pages that people decide by: the words are in `texts/`, the figures in several results."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable
from typing import Any

from cells import judged, listed, over_vllm, quotients, read, scenarios, source, text, where_certain, which_certain
from tables_lanes import EVERY_H200, MIXED_H200, RULED, SWEEP, THREE_H200

from verifypd.bench import advice, pipelining
from verifypd.bench.campaign import AGAIN
from verifypd.bench.results import NAMES
from verifypd.bench.statistics import FASTER, SLOWER

CLOSED = "bench-serve-h200-closed-384"
PLAIN, MIXED = "bench-serve-h200-plain-closed", "bench-serve-h200-mixed"
PLAIN_MIXED = "bench-serve-h200-plain"
BESIDE = {  # results beside vLLM that pages show: their traffic, and what its loads count
    CLOSED: ("a closed loop", "clients (384 tokens in)"),
    "bench-serve-h200-closed": ("a closed loop", "clients (128 tokens in)"),
    PLAIN: ("a closed loop without drafts", "clients"),
    "bench-serve-h200-tiny1b": ("a closed loop with a draft model", "clients"),
    "bench-serve-h200-tiny1b-mixed": ("mixed traffic with a draft model", "requests/s"),
    MIXED: ("mixed traffic", "requests/s"),
    PLAIN_MIXED: ("mixed traffic without drafts", "requests/s"),
    "bench-serve-h200-32": ("mixed traffic", "requests/s"),
    "bench-serve-h200-32-86b7a45": ("mixed traffic", "requests/s and many long prompts"),
}
PAUSES = {"gap_ms_p50": "median pause", "gap_ms_p99": "p99 of pauses"}
AUTO, STEPS, DRAFT, FP8 = "h200-auto", "h200-head-steps", "h200-draft-steps", "fp8-h200"
LONE = "h200-head-steps-e6dcef9"
OTHERS = ("h200-34b-one", "h200-qwen2-closed", "h200-gemma")
MODELS = ("bench-models-h200", "bench-models-qwen2-gemma-h200")
CROWDS = {  # 16 requests at once, and their numbers
    "draft_pair_bf16": "auto",
    "draft_pair-xeon-crowd": "bfloat16",
    "draft_pair-cascade-lake": "auto",
}
CPU = ("bench-three-way-cpu", "bench-comprehensive-cpu")
LOADED = (THREE_H200, EVERY_H200, MIXED_H200)

Scenario = dict[str, Any]


def closed_glance() -> str:
    """Tokens/s over vLLM's in the closed loop, and the first tokens of many clients."""
    return text("closed-glance", **_closed(CLOSED), **_crowd())


def mixed_glance() -> str:
    """Latencies of mixed traffic over vLLM's."""
    return text("mixed-glance", **_traffic(MIXED))


def vllm_settings() -> str:
    """What vLLM was set to beside a head, in both kinds of traffic."""
    [(drafts, chunk)] = {_vllm_settings(name) for name in (CLOSED, MIXED)}
    return text("vllm-settings", drafts={4: "four"}[drafts], chunk=f"{chunk:,}")


def gpu_expect() -> str:
    """What to expect of a GPU: one question a row."""
    steps, fp8 = read(STEPS)["figures"], read(FP8)["steps"]
    found = {
        **_closed(CLOSED),
        **_traffic(MIXED),
        **{f"plain_{key}": each for key, each in (_closed(PLAIN) | _traffic(PLAIN_MIXED)).items()},
        **_heads("head", "0.8"),
        **_heads("poor", "0.3"),
        "plain_one": f"{steps['plain_tok_s_1']:.0f}",
        "head_one": f"{steps['tok_s_1']:.0f}",
        "lone": f"{read(LONE)['figures']['lone_ttft_ms_2048']:.0f}",
        "fp8": f"{fp8['both']['plain_ms_128']:.2f}",
        "bf16": f"{fp8['bf16']['plain_ms_128']:.2f}",
        "cache": f"{fp8['both']['kv_tokens'] / fp8['bf16']['kv_tokens']:.1f}",
    }
    for name in OTHERS:
        own = read(name)["figures"]
        found[name.replace("-", "_")] = f"{own['tok_s_1']:.0f} ({own['plain_tok_s_1']:.0f})"
    return text("gpu-expect", **found) + source(CLOSED, MIXED, PLAIN, PLAIN_MIXED, AUTO, STEPS, LONE, *OTHERS, FP8)


def vllm_faster() -> str:
    """Where vLLM is faster, in figures, and which of them are certain."""
    low, crowds = _figures(scenarios(MIXED)[8]), {n: _figures(scenarios(PLAIN)[n]) for n in (32, 128)}
    pauses = {n: over_vllm(PLAIN, "gap_ms_p99")[n] for n in crowds}
    found = {
        "lost": listed(_lost()),
        "long_p99": f"{low['ours']['ttft_ms_p99']:.0f}",
        "theirs_long_p99": f"{low['vllm']['ttft_ms_p99']:.0f}",
        "pauses": listed(f"{each['ours']['gap_ms_p99']:.0f}" for each in crowds.values()),
        "theirs_pauses": listed(f"{each['vllm']['gap_ms_p99']:.0f}" for each in crowds.values()),
        "over_pauses": quotients(pauses),
        "pauses_sure": where_certain(pauses),
        **{f"plain_{key}": each for key, each in _traffic(PLAIN_MIXED).items()},
    }
    return text("vllm-faster", **_crowd(), **_traffic(MIXED), **found)


def deploy_choice() -> str:
    """What to use when, and what was measured of it."""
    found = {
        "head": _span(read(AUTO)["figures"].values()),
        "draft": _span(_over(_loads(), "auto", "plain")),
        "pass_1b": f"{read(DRAFT)['figures']['draft_step_ms_1']:.1f}",
        "host": f"{read(STEPS)['details']['idle_1']['host_ms']:.1f}",
        "steps": _span(_over(_same_size(), "pd", "auto")),
        "cpu": _span(_over(_cpu(), "auto", "plain")),
        "pipelined": _span(_over(_pipelining(), "pdv pipelined", "pd"), 1),
    }
    for rate, own in scenarios(MIXED_H200).items():
        times = _e2e(own)
        found[f"mixed_{rate}"] = f"{times.pop('auto'):,.0f}"
        found[f"others_{rate}"] = _span(times.values(), 0)
    counts = advice.rule_counts([read(name) for name in RULED])["readme"]
    words = {"right": advice.RIGHT, "wrong": advice.WRONG, "alike": advice.ALIKE}
    found |= {name: str(counts[word]) for name, word in words.items()}
    names = dict.fromkeys((AUTO, *LOADED, STEPS, DRAFT, SWEEP, *CPU, *RULED))
    return text("deploy-choice", **found, **_lowest()) + source(*names)


def deploy_findings() -> str:
    """What the protocols say of drafts, of a verify lane and of the draft's size."""
    plans = [
        own["arms"]["pdv pipelined"]["parts"]["totals"]["plans_n"] / own["arms"]["pd"]["parts"]["totals"]["plans_n"]
        for own in _pipelining()
    ]
    models = {name: own for file in MODELS for name, own in read(file)["scenarios"].items()}
    sizes = {
        family: " and ".join(f"{ratio:.2f}" for ratio in _over(own, "pdv whole", "plain"))
        for family in ("llama", "qwen2", "gemma")
        if (own := [each for name, each in models.items() if f":{family}" in name])
    }
    many = [own for name, own in models.items() if "n=20" in name]
    return text(
        "deploy-findings",
        **_lowest(),
        **sizes,
        pipelined=_span(_over(_pipelining(), "pdv pipelined", "pd"), 1),
        plans=_span(plans, 1),
        many=_span(_over(many, "pdv pipelined", "plain"), 1),
    )


def deploy_cpu_auto() -> str:
    """What `auto` costs on a CPU that is busy."""
    return text("deploy-cpu-auto", cpu=_span(_over(_cpu(), "auto", "plain")), busy=f"{_busy():.2f}")


def when_not() -> str:
    """Where drafts gain little or cost."""
    crowd = [1 - read(name)["crowd"][numbers]["auto"]["against_plain"] for name, numbers in CROWDS.items()]
    costs = {"crowd": _span((100 * share for share in crowd), 1), "busy": f"{100 * (_busy() - 1):.0f}"}
    return text("when-not", **_heads("poor", "0.3"), **costs)


def _span(values: Iterable[float], digits: int = 2) -> str:
    every = sorted(values)
    return f"{every[0]:,.{digits}f} to {every[-1]:,.{digits}f}"


def _figures(own: Scenario) -> dict[str, dict[str, float]]:
    return {arm: each["figures"] for arm, each in own["arms"].items()}


def _closed(name: str) -> dict[str, str]:
    """Tokens/s over vLLM's."""
    found = over_vllm(name, "tok_s")
    return {"closed": quotients(found), "certain": which_certain(found)}


def _crowd() -> dict[str, str]:
    """128 clients."""
    own = scenarios(CLOSED)[128]
    ours, theirs = _figures(own)["ours"], _figures(own)["vllm"]
    found = {
        "ttft_p50": f"{ours['ttft_ms_p50']:.0f}",
        "theirs_ttft_p50": f"{theirs['ttft_ms_p50']:.0f}",
        "good": f"{100 * ours['good_share']:.0f}",
        "theirs_good": f"{100 * theirs['good_share']:.0f}",
    }
    for figure in ("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p95", "good_share"):
        crowd = {128: over_vllm(CLOSED, figure)[128]}
        found |= {f"over_{figure}": quotients(crowd), f"{figure}_sure": where_certain(crowd)}
    return found


def _heads(name: str, alpha: str) -> dict[str, str]:
    """What a head makes of one request and of 128."""
    found = read(AUTO)["figures"]
    return {f"{name}_{level}": f"{found[f'auto_over_plain_{alpha}_{level}']:.2f}" for level in (1, 128)}


def _traffic(name: str) -> dict[str, str]:
    """Mixed traffic: figures over vLLM's at each rate, and which are certain; two that have no interval."""
    compared = {
        "speed": "tok_s", "whole": "e2e_ms_mean", "tpot_p95": "tpot_ms_p95", "first": "ttft_ms_p50",
        "first_p95": "ttft_ms_p95", "pause_p50": "gap_ms_p50",
    }  # fmt: skip
    found = {"rates": listed(map(str, scenarios(name)))}
    for key, figure in compared.items():
        each = over_vllm(name, figure)
        found |= {key: quotients(each), f"{key}_sure": where_certain(each)}
    return found | {"pause": _pooled(name, "gap_ms_max"), "first_p99": _pooled(name, "ttft_ms_p99")}


def _pooled(name: str, figure: str) -> str:
    """Ours over each of vLLM's runs, from figures pooled over seeds: there is no interval of them."""
    arms = [_figures(own) for own in scenarios(name).values()]
    return _span(each["ours"][figure] / each[run][figure] for each in arms for run in each if run != "ours")


def _lost() -> list[str]:
    """Figures of ours that are certainly worse than vLLM's, in the results that the pages show."""
    return [
        f"the {PAUSES.get(figure, NAMES[figure])} of {kind} at {level} {unit}, {' × '.join(judged(each).split()[:2])}"
        for name, (kind, unit) in BESIDE.items()
        for level, own in scenarios(name).items()
        for figure, each in own["compared"]["ours"].items()
        if each["verdict"] == SLOWER
    ]


def _vllm_settings(name: str) -> tuple[int, int]:
    """How many tokens vLLM drafted, and how many it read in a step at most."""
    parts = shlex.split(read(name)["arms"]["vllm"]["about"]["launch"])
    flags = dict(itertools.pairwise(parts))
    drafts = json.loads(flags["--speculative-config"])["num_speculative_tokens"]
    return int(drafts), int(flags["--max-num-batched-tokens"])


def _e2e(own: Scenario) -> dict[str, float]:
    """Mean E2E of each arm."""
    return {arm: each["e2e_ms_mean"] for arm, each in _figures(own).items() if not arm.endswith(AGAIN)}


def _over(founds: Iterable[Scenario], one: str, other: str) -> list[float]:
    """Mean E2E of an arm over another's, where both ran."""
    return [times[one] / times[other] for times in map(_e2e, founds) if {one, other} <= times.keys()]


def _loads() -> list[Scenario]:
    return [own for name in LOADED for own in read(name)["scenarios"].values()]


def _lowest() -> dict[str, str]:
    """In how many of these loads no arm's mean E2E is certainly below that of `auto`, and in how many that of `auto` is
    certainly below every arm's, or that of `plain`."""
    loads = [(found, own) for found in map(read, LOADED) for own in found["scenarios"].values()]
    names = [advice.lowest(found, own) for found, own in loads]
    over_plain = [own["compared"]["auto"]["e2e_ms_mean"]["verdict"] for _, own in loads]
    counts = {
        "lowest": sum("auto" in each for each in names),
        "alone": sum(each == ["auto"] for each in names),
        "faster": over_plain.count(FASTER),
        "loads": len(loads),
    }
    return {name: str(count) for name, count in counts.items()}


def _same_size() -> list[Scenario]:
    return [own for name, own in read(SWEEP)["scenarios"].items() if "tinyllama-1.1b:tinyllama-1.1b" in name]


def _pipelining() -> list[Scenario]:
    """Loads of B and D in which PDV pipelined."""
    found = [own for name in (THREE_H200, EVERY_H200) for own in read(name)["scenarios"].values()]
    return [own for own in found if pipelining.pipelined(own, "pdv pipelined")]


def _cpu() -> list[Scenario]:
    """B with several requests, and D, on two cores."""
    return [own for name in CPU for key, own in read(name)["scenarios"].items() if key != "B n=1"]


def _busy() -> float:
    """Mean E2E of `auto` over that of `plain` where a CPU's cores are busy."""
    [ratio] = _over([read("bench-sweep-cpu")["scenarios"]["A C=32"]], "auto", "plain")
    return ratio
