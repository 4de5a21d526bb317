"""What of a campaign's results is kept beside the code: figures and comparisons, every seed's own, thinned curves.

Knows results as plain data; nothing of pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

LARGEST = 200_000  # bytes of a file; what would make it larger goes, in the order of `PARTS`
EACH = 4  # every fourth point of a curve stays, of 101
BINS = 2  # of a histogram become one
SAMPLES = 40  # of a timeline stay
EXACT = "by_seed"  # to six digits: intervals are computed from these
PARTS = ("timeline", "histograms", "curves", EXACT)  # the least of use first


def small(found: dict[str, Any]) -> str:
    """The results as the text of a file that is no larger than `LARGEST`, if figures and comparisons leave room."""
    text = ""
    for count in range(len(PARTS) + 1):
        text = _text(_with(found, PARTS[count:]))
        if len(text.encode()) <= LARGEST:
            break
    return text


def _with(found: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The results with these parts thinned, and without the others."""
    scenarios = {
        name: each | {"arms": {arm: _arm(own, parts) for arm, own in each["arms"].items()}}
        for name, each in found["scenarios"].items()
    }
    return dict(_rounded(found | {"scenarios": scenarios}))


def _arm(own: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    kept = {name: value for name, value in own.items() if name not in PARTS}
    thin: dict[str, Callable[[Any], Any]] = {
        EXACT: lambda seeds: seeds,
        "curves": lambda curves: {name: values[::EACH] for name, values in curves.items()},
        "histograms": lambda bins: {name: _coarse(each) for name, each in bins.items()},
    }
    kept |= {name: thin[name](own[name]) for name in thin if name in parts and name in own}
    if own["parts"] is not None:
        line = own["parts"].get("timeline", {}) if "timeline" in parts else {}
        rest = {name: value for name, value in own["parts"].items() if name != "timeline"}
        kept["parts"] = rest | ({"timeline": _few(line)} if line.get("at") else {})
    return kept


def _coarse(bins: dict[str, list[float]]) -> dict[str, list[float]]:
    """A histogram of wider bins."""
    edges, counts = bins["edges"], bins["counts"]
    if len(counts) % BINS:
        return bins
    return {"edges": edges[::BINS], "counts": [sum(counts[i : i + BINS]) for i in range(0, len(counts), BINS)]}


def _few(line: dict[str, list[float]]) -> dict[str, list[float]]:
    """Samples evenly drawn, the first and the last among them."""
    count = len(line["at"])
    places = sorted({round(i * (count - 1) / (SAMPLES - 1)) for i in range(SAMPLES)})
    return {name: [values[i] for i in places] for name, values in line.items()}


def _rounded(value: Any, digits: int = 4) -> Any:
    """Plain data with numbers of so many digits."""
    if isinstance(value, dict):
        return {name: _rounded(each, 6 if name == EXACT else digits) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _text(found: dict[str, Any]) -> str:
    """A line for each scenario."""
    rest = {name: value for name, value in found.items() if name != "scenarios"}
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}" for name, each in found["scenarios"].items()
    )
    head = json.dumps(rest, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n "scenarios": {{\n{lines}\n }}\n}}\n'
