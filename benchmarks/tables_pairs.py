"""Tables of the built-in pair on CPUs: what drafts gain for one request and cost for many, and what rounding does."""

from __future__ import annotations

import statistics
from typing import Any

from cells import read, rows, source, text

ARM, AMX, AMX_CROWD, PANELS = "draft_pair_bf16", "draft_pair-xeon", "draft_pair-xeon-crowd", "draft_pair-cascade-lake"
SAMPLED = "draft_pair-sampled-cascade-lake"
FLOAT, FLOAT_32 = "draft_pair_planner", "draft_pair_planner_32"
AMX_FLOAT, AMX_FLOAT_CROWD = "draft_pair-xeon-float32", "draft_pair-xeon-float32-crowd"
PROCESSORS = {"Neoverse-N1": (ARM, ARM), "Xeon with AMX": (AMX, AMX_CROWD), "Cascade Lake": (PANELS, PANELS)}
NUMBERS = {"bfloat16, the default": (AMX, AMX_CROWD), "float32": (AMX_FLOAT, AMX_FLOAT_CROWD)}
KL = {
    "bfloat16, packed as float16": ("weights_kl-neoverse-n1", "bfloat16"),
    "bfloat16 by AMX tiles": ("weights_kl-xeon", "bfloat16"),
    "bfloat16 as torch multiplies it there": ("weights_kl-xeon", "torch"),
    "bfloat16 in panels": ("wide_passes-cascade-lake", "bfloat16"),
    "int8 (`--quantization int8`, never chosen by `auto`) on ARM": ("weights_kl-neoverse-n1", "int8"),
    "the same in panels": ("wide_passes-cascade-lake-int8", "int8"),
}


def cpu_pairs() -> str:
    """`auto` beside `plain`, one request and 16 at once, on each processor."""
    lines = []
    for processor, (one, crowd) in PROCESSORS.items():
        single, many = _part(one, "one_request"), _part(crowd, "crowd")
        prompts = f"{processor}, one request, {read(one)['prompts']} held-out prompts"
        lines.append([prompts, _speed(single, "auto"), _speed(single, "plain"), f"**{_ratio(single)}**"])
        twice = f"{_speed(many, 'plain')} and {_speed(many, 'plain, again')}"
        lines.append(["the same, 16 requests at once", _speed(many, "auto"), twice, _ratio(many)])
    names = dict.fromkeys(name for pair in PROCESSORS.values() for name in pair)
    return rows(["", "tokens/s, `auto`", "`plain`", "ratio (95 % interval)"], lines) + source(*names)


def cpu_glance() -> str:
    """One request with drafts and without, on each processor."""
    pairs = {name: _part(file, "one_request") for name, file in (("arm", ARM), ("amx", AMX), ("panels", PANELS))}
    arms = ("auto", "plain")
    return text("cpu-glance", **{f"{name}_{arm}": _speed(own, arm) for name, own in pairs.items() for arm in arms})


def cpu_copying() -> str:
    """Prompts that ask for a copy."""
    found = _part("draft_pair", "copying")
    gains = {arm: f"{found[arm]['against_plain']:.2f}" for arm in ("auto", "ngram", "draft")}
    return text("cpu-copying", **gains, commit=read("draft_pair")["commit"][:7])


def cpu_float32() -> str:
    """The same in float32."""
    found = {
        "1": _part(FLOAT, "one_request"),
        "16 at once, cut at 64 tokens": _part(FLOAT, "crowd"),
        "32 at once": _part(FLOAT_32, "crowd"),
    }
    header = ["requests", "tokens/s over those of `plain`"]
    return rows(header, [[level, _ratio(own)] for level, own in found.items()]) + source(FLOAT, FLOAT_32)


def cpu_sampled() -> str:
    """One request, sampled in several ways."""
    lines = []
    for settings, own in read(SAMPLED)["sampled"]["auto"].items():
        lines.append([settings, _speed(own, "auto"), _speed(own, "plain"), _ratio(own)])
    return rows(["one request", "tokens/s, `auto`", "`plain`", "ratio (95 % interval)"], lines) + source(SAMPLED)


def xeon_numbers() -> str:
    """bfloat16 and float32 on a Xeon with AMX."""
    lines = []
    for numbers, (one, crowd) in NUMBERS.items():
        single, many = _part(one, "one_request"), _part(crowd, "crowd")
        twice = f"{_speed(many, 'plain')} and {_speed(many, 'plain, again')}"
        speeds = [_speed(single, "auto"), _speed(single, "plain"), f"{single['auto']['against_plain']:.2f} ×"]
        lines.append([numbers, *speeds, _speed(many, "auto"), twice])
    header = ["numbers", "one request, `auto`", "`plain`", "ratio", "16 at once, `auto`", "`plain`, twice"]
    return rows(header, lines) + source(*(name for pair in NUMBERS.values() for name in pair))


def weights_kl() -> str:
    """How far weights of fewer bits move the distribution."""
    lines = []
    for weights, (name, kind) in KL.items():
        own = read(name)["moved"][kind]
        kl = f"{own['mean_kl']:.1g}" if own["mean_kl"] >= 1e-4 else f"{own['mean_kl']:.5f}"
        lines.append([weights, kl, f"{100 * own['argmax_agreement']:.1f} %", str(own["positions"])])
    names = dict.fromkeys(name for name, _ in KL.values())
    return rows(["weights", "KL, nats", "the likeliest token is the same", "positions"], lines) + source(*names)


def _part(name: str, section: str) -> dict[str, Any]:
    """One request, or a crowd, of a result of `draft_pair.py`, in the numbers it ran in."""
    [found] = read(name)[section].values()
    return dict(found)


def _builds(found: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    """An arm in each engine that was built; one request has one of each."""
    return [each[arm] for each in found.get("builds", [found])]


def _speed(found: dict[str, Any], arm: str) -> str:
    return f"{statistics.mean(each['tokens_per_second'] for each in _builds(found, arm)):.0f}"


def _ratio(found: dict[str, Any]) -> str:
    """`auto` over `plain`; a crowd of one build has the interval of its rounds."""
    ratio = found["auto"]["against_plain"]
    low, high = found["auto"].get("interval_95") or _builds(found, "auto")[0]["interval_95"]
    digits = 2 if ratio > 1 or high - low > 0.2 else 3
    return f"{ratio:.{digits}f} × ({low:.{digits}f} to {high:.{digits}f})"
