"""Answers in short, for pages that people decide by: the words are in `texts/`, the figures in several results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from cells import read, source, text
from tables_lanes import EVERY_H200, MIXED_H200, RULED, SWEEP, THREE_H200

from verifypd.bench import advice, modes
from verifypd.bench.campaign import AGAIN

CLOSED = "bench-serve-h200-closed-384"
PLAIN, MIXED = "bench-serve-h200-plain-closed", "bench-serve-h200-mixed"
AUTO, STEPS, DRAFT, FP8 = "h200-auto", "h200-head-steps", "h200-draft-steps", "fp8-h200"
OTHERS = ("h200-34b-one", "h200-qwen2-closed", "h200-gemma")
MODELS = ("bench-models-h200", "bench-models-qwen2-gemma-h200")
CROWDS = {"draft_pair_bf16": "auto", "draft_pair-xeon-crowd": "bfloat16"}  # 16 requests at once, and their numbers
CPU = ("bench-three-way-cpu", "bench-comprehensive-cpu")
LOADED = (THREE_H200, EVERY_H200, MIXED_H200)

Scenario = dict[str, Any]


def closed_glance() -> str:
    """Tokens/s over vLLM's in the closed loop, and the first tokens of many clients."""
    return text("closed-glance", **_closed(), **_crowd())


def mixed_glance() -> str:
    """Latencies of mixed traffic over both of vLLM's runs."""
    names = {"whole": "e2e_ms_mean", "tpot_p95": "tpot_ms_p95", "pause": "gap_ms_max", "first": "ttft_ms_p50"}
    tails = {"first_p95": "ttft_ms_p95", "first_p99": "ttft_ms_p99"}
    return text("mixed-glance", **{key: _mixed(name) for key, name in (names | tails).items()})


def gpu_expect() -> str:
    """What to expect of a GPU: one question a row."""
    steps, fp8 = read(STEPS)["figures"], read(FP8)["steps"]
    found = {
        **_closed(),
        **_heads("head", "0.8"),
        **_heads("poor", "0.3"),
        "plain": _listed(_speeds(PLAIN)),
        "whole": _mixed("e2e_ms_mean"),
        "tpot_p95": _mixed("tpot_ms_p95"),
        "pause": _mixed("gap_ms_max"),
        "first": _mixed("ttft_ms_p50"),
        "plain_one": f"{steps['plain_tok_s_1']:.0f}",
        "head_one": f"{steps['tok_s_1']:.0f}",
        "lone": f"{steps['lone_ttft_ms_2048']:.0f}",
        "fp8": f"{fp8['both']['plain_ms_128']:.2f}",
        "bf16": f"{fp8['bf16']['plain_ms_128']:.2f}",
        "cache": f"{fp8['both']['kv_tokens'] / fp8['bf16']['kv_tokens']:.1f}",
    }
    for name in OTHERS:
        own = read(name)["figures"]
        found[name.replace("-", "_")] = f"{own['tok_s_1']:.0f} for {own['plain_tok_s_1']:.0f}"
    return text("gpu-expect", **found) + source(CLOSED, MIXED, PLAIN, AUTO, STEPS, *OTHERS, FP8)


def vllm_faster() -> str:
    """Where vLLM is faster, in figures."""
    low, plain = _scenarios(MIXED)[8], _scenarios(PLAIN)
    pauses = {
        arm: _listed(f"{_figures(plain[n])[arm]['gap_ms_p99']:.0f}" for n in (32, 128)) for arm in ("ours", "vllm")
    }
    return text(
        "vllm-faster",
        **_crowd(),
        long_p99=f"{_figures(low)['ours']['ttft_ms_p99']:.0f}",
        theirs_long_p99=f"{_figures(low)['vllm']['ttft_ms_p99']:.0f}",
        long_p95=_mixed("ttft_ms_p95", 8),
        later_p99=_mixed("ttft_ms_p99", 16, 20),
        pauses=pauses["ours"],
        theirs_pauses=pauses["vllm"],
    )


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
    for rate, own in _scenarios(MIXED_H200).items():
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


def _listed(values: Iterable[str]) -> str:
    *first, last = values
    return f"{', '.join(first)} and {last}" if first else last


def _span(values: Iterable[float], digits: int = 2) -> str:
    every = sorted(values)
    return f"{every[0]:,.{digits}f} to {every[-1]:,.{digits}f}"


def _scenarios(name: str) -> dict[int, Scenario]:
    """Those of a result by their clients or requests/s."""
    found = {re.findall(r"(?:closed |poisson |E )(\d+)", key)[0]: own for key, own in read(name)["scenarios"].items()}
    return {int(level): found[level] for level in sorted(found, key=int)}


def _figures(own: Scenario) -> dict[str, dict[str, float]]:
    return {arm: each["figures"] for arm, each in own["arms"].items()}


def _speeds(*names: str, certain: bool = False) -> list[str]:
    """Our tokens/s over vLLM's; only those whose interval leaves 1 out."""
    found = [own["compared"]["ours"]["tok_s"] for name in names for own in _scenarios(name).values()]
    return [f"{each['ratio']:.2f}" for each in found if not certain or each["verdict"] != "no difference"]


def _closed() -> dict[str, str]:
    sure = _speeds(CLOSED, certain=True)
    verb = "is" if len(sure) == 1 else "are"
    certain = f"Only {_listed(sure)} {verb} certain: the other 95 % intervals contain 1" if sure else "None is certain"
    return {"closed": _listed(_speeds(CLOSED)), "certain": certain}


def _crowd() -> dict[str, str]:
    """128 clients."""
    own = _scenarios(CLOSED)[128]
    over, ours, theirs = own["compared"]["ours"], _figures(own)["ours"], _figures(own)["vllm"]
    return {
        "ttft_p50": f"{ours['ttft_ms_p50']:.0f}",
        "theirs_ttft_p50": f"{theirs['ttft_ms_p50']:.0f}",
        "good": f"{100 * ours['good_share']:.0f}",
        "theirs_good": f"{100 * theirs['good_share']:.0f}",
        "over_ttft_p95": f"{over['ttft_ms_p95']['ratio']:.2f}",
        "over_tpot_p95": f"{over['tpot_ms_p95']['ratio']:.2f}",
    }


def _heads(name: str, alpha: str) -> dict[str, str]:
    """What a head makes of one request and of 128."""
    found = read(AUTO)["figures"]
    return {f"{name}_{level}": f"{found[f'auto_over_plain_{alpha}_{level}']:.2f}" for level in (1, 128)}


def _mixed(figure: str, *rates: int) -> str:
    """Ours over each of vLLM's two runs in mixed traffic."""
    arms = [_figures(own) for rate, own in _scenarios(MIXED).items() if not rates or rate in rates]
    return _span(each["ours"][figure] / each[run][figure] for each in arms for run in ("vllm", "vllm again"))


def _e2e(own: Scenario) -> dict[str, float]:
    """Mean E2E of each arm."""
    return {arm: each["e2e_ms_mean"] for arm, each in _figures(own).items() if not arm.endswith(AGAIN)}


def _over(founds: Iterable[Scenario], one: str, other: str) -> list[float]:
    """Mean E2E of an arm over another's, where both ran."""
    return [times[one] / times[other] for times in map(_e2e, founds) if {one, other} <= times.keys()]


def _loads() -> list[Scenario]:
    return [own for name in LOADED for own in read(name)["scenarios"].values()]


def _lowest() -> dict[str, str]:
    """In how many of these loads `auto` has the lowest mean E2E."""
    times = [_e2e(own) for own in _loads()]
    return {"lowest": str(sum(each["auto"] == min(each.values()) for each in times)), "loads": str(len(times))}


def _same_size() -> list[Scenario]:
    return [own for name, own in read(SWEEP)["scenarios"].items() if "tinyllama-1.1b:tinyllama-1.1b" in name]


def _pipelining() -> list[Scenario]:
    """Loads of B and D in which PDV pipelined."""
    found = [own for name in (THREE_H200, EVERY_H200) for own in read(name)["scenarios"].values()]
    return [own for own in found if modes.pipelined(own, "pdv pipelined")]


def _cpu() -> list[Scenario]:
    """B with several requests, and D, on two cores."""
    return [own for name in CPU for key, own in read(name)["scenarios"].items() if key != "B n=1"]


def _busy() -> float:
    """Mean E2E of `auto` over that of `plain` where a CPU's cores are busy."""
    [ratio] = _over([read("bench-sweep-cpu")["scenarios"]["A C=32"]], "auto", "plain")
    return ratio
