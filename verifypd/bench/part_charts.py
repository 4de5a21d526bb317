"""Charts of what arms were doing: where the time went, utilisation, memory, acceptance, lanes, drafts. Data only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from verifypd.bench.charts import Chart, Series, arms_of
from verifypd.bench.meter import SETTLES
from verifypd.bench.pipelining import APART, HARDLY, MARK, SAID, count, mark
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
NEARLY_ALL = 0.9  # of an arm's drafts: what is not accepted of them at a place is not for want of a token there
HAD = "Over all scenarios: of the drafts that had a token there, the share in which it was accepted"
OF_ALL = "Over all scenarios: the share of all drafts in which this token was accepted"
LACKED = f"–: a place that more than {100 * (1 - NEARLY_ALL):.0f} % of an arm's drafts may have lacked."
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
    own = {arm: figures[metric] for arm, figures in count(found["scenarios"]).items() if metric in figures}
    if not any(sum(each.values()) for each in own.values()):  # one seed says neither
        return None
    places = tuple(float(i) for i in range(len(own)))
    apart = any(each[HARDLY] for each in own.values())
    series = tuple(
        Series(f"{word}{MARK * (word == HARDLY)}", places, tuple(float(each[word]) for each in own.values()),
               colour=colour)
        for word, colour in ((FASTER, 2), (SLOWER, 1), (NONE, 6), (HARDLY, 3)) if apart or word != HARDLY
    )  # fmt: skip
    title = f"Scenarios won and lost against {found['reference']}, by mean E2E"
    note = f"{APART} " * apart + "The original counts 20 of 32 scenarios as won, without intervals."
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
    groups = tuple(arm + mark(found["scenarios"][scenario], arm) for arm in arms)
    note = f"{VERIFY_ONLY if whole else SPLIT} {HOST}" + f" {SAID}" * (groups != tuple(arms))
    return Chart("breakdown", "Where the time went", "", "share", series, "stacked", groups, note=note)


def acceptance(found: dict[str, Any]) -> Chart | None:
    """Draft tokens accepted, by their place. Bars: where arms are alike, lines would cover each other."""
    shares, unsaid = {}, []
    for arm in arms_of(found):
        drafts = [own["arms"].get(arm, {}).get("drafts") for own in found["scenarios"].values()]
        have = [each for each in drafts if each and each["by_place"]]
        if have:
            told = all("drafted" in each for each in have)
            shares[arm] = _of_those_that_had(have) if told else _of_all(have)
            unsaid += [] if told else [arm]
    if not shares:
        return None
    longest = max(map(len, shares.values()))
    places = tuple(float(i) for i in range(longest))
    series = tuple(Series(arm, places, (*own, *[math.nan] * (longest - len(own)))) for arm, own in shares.items())
    title = "Share of drafted tokens accepted, by place in the draft"
    groups = tuple(str(i + 1) for i in range(longest))
    note = _meaning(list(shares), unsaid, {arm for arm, own in shares.items() if len(own) < longest})
    return Chart("acceptance_rate", title, "place in the draft", "share", series, "bars", groups, note=note)


def _meaning(arms: list[str], unsaid: list[str], short: set[str]) -> str:
    """What the shares are of. unsaid: arms that do not say how long drafts were; short: arms without some places."""
    said = set(arms) - set(unsaid)
    parts = [f"{HAD}." if said else f"{OF_ALL}; nothing says how long drafts were."]
    if said and unsaid:
        parts.append(f"Of all drafts where nothing says how long they were: {', '.join(unsaid)}.")
    if short & said:
        parts.append(f"–: a place that under {FEW_DRAFTS} of an arm's drafts had.")
    if short & set(unsaid):
        parts.append(LACKED)
    return " ".join(parts)


def _accepted(drafts: dict[str, Any], place: int) -> float:
    """How many drafts of a scenario had their token at this place accepted."""
    if place >= len(drafts["by_place"]):
        return 0.0
    had = drafts["drafted"][place] if "drafted" in drafts else drafts["spans"]
    return float(had * drafts["by_place"][place])


def _of_those_that_had(drafts: Sequence[dict[str, Any]]) -> list[float]:
    """By place over some scenarios: of the drafts that had it, the share in which it was accepted. Of few none."""
    shares: list[float] = []
    for place in range(max(len(each["by_place"]) for each in drafts)):
        had = sum(each["drafted"][place] for each in drafts if place < len(each["by_place"]))
        if had < FEW_DRAFTS and shares:
            break
        shares.append(sum(_accepted(each, place) for each in drafts) / had)
    return shares


def _of_all(drafts: Sequence[dict[str, Any]]) -> list[float]:
    """By place over some scenarios: of all drafts, the share in which it was accepted.

    Of places that nearly all must have had. Drafts of `mean` tokens, `longest` at most, have more than i at least in
    the share (mean − i) / (longest − i): as if all others were as long as that allows.
    """
    spans = sum(each["spans"] for each in drafts)
    places = range(max(len(each["by_place"]) for each in drafts))
    accepted = [sum(_accepted(each, place) for each in drafts) for place in places]
    tokens = sum(
        sum(_accepted(each, place) for place in places) / each["acceptance_rate"]
        for each in drafts
        if each["acceptance_rate"]
    )
    mean, longest = tokens / spans, len(places)
    sure = [1.0, *((mean - i) / (longest - i) for i in places[1:])]
    return [stood / spans for stood, share in zip(accepted, sure, strict=True) if share >= NEARLY_ALL]


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
