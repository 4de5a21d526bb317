"""Charts of what arms were doing: where the time went, utilisation, memory, acceptance, lanes, drafts. Data only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from verifypd.bench.charts import Chart, Series, arms_of
from verifypd.bench.meter import SETTLES
from verifypd.bench.protocols import PDV
from verifypd.bench.statistics import FASTER, NONE, SLOWER

KINDS = ("prefill", "draft", "verify", "host", "idle")
LANES = ("waiting", "prefill_lane", "decode_lane", "verify_lane")
CLAIMED = {"baseline": 0.50, "pd": 0.67, **dict.fromkeys(PDV, 0.90)}
CLAIM = "claimed by the original"
MB = 1 << 20
SPLIT = "A verify pass that carries prompts is split by its rows: those of prompts are prefill."
VERIFY_ONLY = "Prompts that ride in verify passes count as verify."
HOST = "host: time of steps that no pass or draft loop hides. idle: nothing was to be done."
FEW_DRAFTS = 20  # a share of fewer is one of chance
WINDOW = 8  # samples over which a draft length is taken


def overview(found: dict[str, Any]) -> list[Chart]:
    """Over all scenarios: utilisation, memory, CPU time, scenarios won, acceptance; what nobody says is left out."""
    made = [_utilisation(found), _memory(found), _cpu(found), _won(found), acceptance(found)]
    return [each for each in made if each is not None]


def of_scenario(found: dict[str, Any], scenario: str) -> list[Chart]:
    """Of one scenario: where the time went, who was in which lane, how long drafts were."""
    made = [breakdown(found, scenario), _lanes(found, scenario), _lengths(found, scenario)]
    return [each for each in made if each is not None]


def _own(found: dict[str, Any], scenario: str, arm: str) -> dict[str, Any] | None:
    own = found["scenarios"][scenario]["arms"].get(arm)
    return None if own is None else own.get("parts")


def _utilisation(found: dict[str, Any]) -> Chart | None:
    scenarios = list(found["scenarios"])
    gauge = any(
        "gpu_utilization" in (parts["means"])
        for s in scenarios for arm in arms_of(found) if (parts := _own(found, s, arm)) is not None
    )  # fmt: skip
    series = []
    for arm in arms_of(found):
        have = [(i, parts) for i, s in enumerate(scenarios) if (parts := _own(found, s, arm)) is not None]
        values = [p["means"].get("gpu_utilization", math.nan) if gauge else p["busy"] for _, p in have]
        points = list(zip([float(i) for i, _ in have], values, strict=True))
        if arm in CLAIMED and have:
            points.append((float(len(scenarios)), CLAIMED[arm]))
        if points:
            xs, ys = zip(*points, strict=True)
            series.append(Series(arm, xs, tuple(y if math.isnan(y) else min(1.0, y) for y in ys)))
    if not series:
        return None
    what = "GPU utilisation (NVML)" if gauge else "Share of the time in which a pass or a draft loop ran"
    note = "Under open arrivals it is set by the load: an arm that needs less device time for the same tokens is lower."
    if any(math.isnan(y) for each in series for y in each.ys):
        note += f" –: the runs took less than {SETTLES:g} s, too short for the counter."
    groups = (*scenarios, CLAIM)
    return Chart("gpu_utilization", what, "", "share", tuple(series), "bars", groups, note=note)


def _memory(found: dict[str, Any]) -> Chart | None:
    note = "Weights, and the KV blocks that requests held at the peak. The original says PDV needs 2–5 % more."
    return _bars(found, lambda own: own["parts"]["peaks"].get("memory", math.nan) / MB,
                 "memory", "Memory in use at the peak", "MB", note)  # fmt: skip


def _cpu(found: dict[str, Any]) -> Chart | None:
    note = "All threads of the process, the one that sends requests too."
    return _bars(found, lambda own: 1e3 * own["parts"]["totals"].get("cpu_s", math.nan)
                 / max(1, own["figures"]["output_tokens"]),
                 "cpu_time", "CPU time for each output token", "ms", note)  # fmt: skip


def _bars(
    found: dict[str, Any], value: Callable[[dict[str, Any]], float], name: str, title: str, unit: str, note: str
) -> Chart | None:
    """A number of each arm in every scenario; one that is not known is left out."""
    series = []
    for arm in arms_of(found):
        owns = [each["arms"].get(arm) for each in found["scenarios"].values()]
        values = [value(own) if own and own.get("parts") else math.nan for own in owns]
        have = [(float(i), number) for i, number in enumerate(values) if not math.isnan(number)]
        if have:
            xs, ys = zip(*have, strict=True)
            series.append(Series(arm, xs, ys))
    return Chart(name, title, "", unit, tuple(series), "bars", tuple(found["scenarios"]), note=note) if series else None


def _won(found: dict[str, Any], metric: str = "e2e_ms_mean") -> Chart | None:
    own = {arm: figures[metric] for arm, figures in found["won_and_lost"].items() if metric in figures}
    if not any(sum(each.values()) for each in own.values()):  # one seed says neither
        return None
    places = tuple(float(i) for i in range(len(own)))
    series = tuple(
        Series(word, places, tuple(float(each[word]) for each in own.values()), colour=colour)
        for word, colour in ((FASTER, 2), (SLOWER, 1), (NONE, 6))
    )
    title = f"Scenarios won and lost against {found['reference']}, by mean E2E"
    note = "The original counts 20 of 32 scenarios as won, without intervals."
    return Chart("scenarios_won", title, "", "scenarios", series, "stacked", tuple(own), note=note)


def breakdown(found: dict[str, Any], scenario: str) -> Chart | None:
    """Where the time of a run went, arm by arm."""
    arms = [arm for arm in arms_of(found) if _own(found, scenario, arm) is not None]
    if not arms:
        return None
    parts = {arm: found["scenarios"][scenario]["arms"][arm]["parts"] for arm in arms}
    places = tuple(float(i) for i in range(len(arms)))
    series = tuple(
        Series(kind, places, tuple(parts[arm]["shares"][kind] for arm in arms), colour=6 if kind == "idle" else None)
        for kind in KINDS
    )
    whole = not all("chunks_s" in each["totals"] for each in parts.values())  # as older results have them
    note = f"{VERIFY_ONLY if whole else SPLIT} {HOST}"
    return Chart("breakdown", "Where the time went", "", "share", series, "stacked", tuple(arms), note=note)


def acceptance(found: dict[str, Any]) -> Chart | None:
    """Draft tokens accepted, by their place."""
    series, unsaid = [], []
    for arm in arms_of(found):
        drafts = [own["arms"].get(arm, {}).get("drafts") for own in found["scenarios"].values()]
        have = [each for each in drafts if each]
        if have:
            shares, told = _by_place(have)
            series.append(Series(arm, tuple(float(i + 1) for i in range(len(shares))), tuple(shares)))
            unsaid += [] if told else [arm]
    if not series:
        return None
    whole = "of all drafts; a shorter one counts as not accepted at the places it lacks."
    of = f"of drafts that had this place, where {FEW_DRAFTS} had it."
    note = f"In all scenarios, {whole if len(unsaid) == len(series) else of}"
    if 0 < len(unsaid) < len(series):
        note += f" {', '.join(unsaid)}: {whole}"
    title = "Share of drafted tokens accepted, by place in the draft"
    return Chart("acceptance_rate", title, "place in the draft", "share", tuple(series), note=note)


def _by_place(drafts: Sequence[dict[str, Any]]) -> tuple[list[float], bool]:
    """Shares of accepted tokens by place over some scenarios, and whether they are of the drafts that had the place.

    Of few drafts no share is told.
    """
    told = all("drafted" in each for each in drafts)
    spans = sum(each["spans"] for each in drafts)
    shares: list[float] = []
    for i in range(max(len(each["by_place"]) for each in drafts)):
        own = [each for each in drafts if i < len(each["by_place"])]
        counts = [each["drafted"][i] if told else each["spans"] for each in own]
        stood = sum(count * each["by_place"][i] for count, each in zip(counts, own, strict=True))
        had = sum(counts) if told else spans
        if told and had < FEW_DRAFTS and shares:
            break
        shares.append(stood / had)
    return shares, told


def _timeline(parts: dict[str, Any] | None) -> dict[str, Any]:
    """What an arm did over time; nothing where it does not say, or results were kept without it."""
    return dict(parts.get("timeline", {})) if parts else {}


def _lanes(found: dict[str, Any], scenario: str) -> Chart | None:
    """Requests in each lane over time, of the arm with most lanes."""
    known = [arm for arm in (*PDV, *arms_of(found)) if arm in arms_of(found)]
    for arm in known:
        parts = _own(found, scenario, arm)
        line = _timeline(parts)
        if len(line.get("at", ())) > 2 and LANES[0] in line:
            series = [Series(name.removesuffix("_lane"), tuple(line["at"]), tuple(line[name])) for name in LANES]
            return Chart("lanes", f"Requests by lane, {arm}, first seed", "s", "requests", tuple(series))
    return None


def _lengths(found: dict[str, Any], scenario: str) -> Chart | None:
    """Draft tokens a verdict over time."""
    series = []
    for arm in arms_of(found):
        parts = _own(found, scenario, arm)
        line = _timeline(parts)
        if not any(line.get("drafted_n", ())):
            continue
        points = []
        for i in range(0, len(line["at"]) - WINDOW, max(1, WINDOW // 2)):
            verdicts = line["verdicts_n"][i + WINDOW] - line["verdicts_n"][i]
            if verdicts > 0:
                drafted = line["drafted_n"][i + WINDOW] - line["drafted_n"][i]
                points.append((line["at"][i + WINDOW // 2], drafted / verdicts))
        if len(points) > 2:
            xs, ys = zip(*points, strict=True)
            series.append(Series(arm, xs, ys))
    if not series:
        return None
    return Chart("draft_length", "Draft tokens a verdict, first seed", "s", "tokens", tuple(series))
