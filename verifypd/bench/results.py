"""From the cells of a campaign to results: figures, curves and comparisons as plain data, a table and a summary.

Knows cells and statistics; nothing of pictures.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from verifypd.bench.campaign import AGAIN, Cell, Folder
from verifypd.bench.figures import Outcome, Pool, Targets, figures
from verifypd.bench.meter import pooled
from verifypd.bench.order import by_load
from verifypd.bench.pipelining import APART, HARDLY, MARK, count, mark, said
from verifypd.bench.statistics import COMPARED, FASTER, NONE, SLOWER, UNKNOWN, compare, curve, histogram, own_noise

TIMES = ("ttft", "tpot", "e2e", "gap")
NAMES = {
    "tok_s": "tokens/s", "good_share": "good share", "e2e_ms_mean": "mean E2E", "e2e_ms_p95": "p95 E2E",
    "ttft_ms_p50": "p50 TTFT", "ttft_ms_p95": "p95 TTFT", "tpot_ms_p50": "p50 TPOT", "tpot_ms_p95": "p95 TPOT",
    "gap_ms_p50": "p50 gap", "gap_ms_p99": "p99 gap",
}  # fmt: skip
MEAN = "e2e_ms_mean"
BESIDE = ("pd", "baseline")  # arms that mean latencies are compared with, besides the reference
BY_SEED = ("tok_s", "goodput", "e2e_ms_mean", "e2e_ms_p95", "ttft_ms_p95", "tpot_ms_p95", "gap_ms_p99", "unfinished")


def results(folder: Folder, reference: str | None = None) -> dict[str, Any]:
    """All that a report shows. reference: the arm the others are compared with (default: the run's, or the first)."""
    head = folder.head
    targets = Targets(**head["targets"])
    cells = folder.cells()
    names = list(head["arms"])
    reference = reference or head.get("reference") or names[0]
    scenarios = {
        scenario: _scenario([cell for cell in cells if cell.scenario == scenario], head["control"], reference, targets)
        for scenario in head["scenarios"]
    }
    wanted = len(scenarios) * len(head["seeds"]) * (len(names) + (head["control"] is not None))
    trees = sorted({cell.files for cell in cells})
    return {
        **head["sittings"][-1],
        "complete": len(cells) == wanted,
        "cells": {"run": len(cells), "planned": wanted},
        "reference": reference,
        **{name: head[name] for name in ("control", "seeds", "targets", "arms", "sittings")},
        "note": head.get("note", ""),
        "headline": "tok_s" if all(telling(each) == "tok_s" for each in scenarios) else "e2e_ms_mean",
        "protocol": head.get("protocol"),
        "grid": head.get("grid", {}),
        "trees": trees,
        "won_and_lost": count(scenarios),
        "scenarios": by_load({name: found for name, found in scenarios.items() if found["arms"]}, head.get("grid", {})),
    }


def _scenario(cells: Sequence[Cell], control: str | None, reference: str, targets: Targets) -> dict[str, Any]:
    by_arm: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        by_arm.setdefault(cell.arm, {})[cell.seed] = cell

    def over(one: str, two: str, noise: dict[str, float]) -> dict[str, Any]:
        seeds = sorted(set(by_arm[one]) & set(by_arm[two]))
        first, second = ([by_arm[arm][seed].outcome for seed in seeds] for arm in (one, two))
        return compare(first, second, targets, noise)

    again = f"{control}{AGAIN}"
    itself = over(again, str(control), {}) if {again, control} <= set(by_arm) else {}
    noise = own_noise(itself)
    compared = {
        arm: {name: each.packed() for name, each in over(arm, reference, noise).items()}
        for arm in by_arm
        if arm not in (reference, again) and reference in by_arm
    }
    beside = {}
    for other in BESIDE:
        arms = [arm for arm in by_arm if arm != other and other in by_arm and other != reference]
        made = {arm: over(arm, other, noise) for arm in arms}
        beside[f"over_{other}"] = {arm: {MEAN: own[MEAN].packed()} for arm, own in made.items() if MEAN in own}
    return {
        "arms": {arm: _arm(list(own.values()), targets) for arm, own in by_arm.items()},
        "compared": compared,
        **beside,
        "itself": {name: each.packed() for name, each in itself.items()},
    }


def _arm(cells: Sequence[Cell], targets: Targets) -> dict[str, Any]:
    outcomes = [cell.outcome for cell in cells]
    pool = Pool(outcomes, targets)
    times = pool.times()
    errors = Counter(record.error for outcome in outcomes for record in outcome.records if record.error)
    return {
        "seeds": [cell.seed for cell in cells],
        "figures": {name: _short(value) for name, value in pool.figures().items()},
        "by_seed": {str(cell.seed): _few(cell.outcome, targets) for cell in cells},
        "curves": {name: curve(times[name]) for name in TIMES},
        "histograms": {name: histogram(times[name]) for name in TIMES},
        "drafts": _drafts(cells),
        "parts": _parts(cells),
        "pauses": _pauses(cells),
        "errors": dict(errors.most_common(5)),
    }


def _few(outcome: Outcome, targets: Targets) -> dict[str, float]:
    found = figures([outcome], targets)
    return {name: _short(found[name]) for name in BY_SEED}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _drafts(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """How drafts fared; None where nothing was drafted, or the arm does not say.

    `by_place`: of the drafts that had a first, second, … token, the share in which it stood. "drafted" says how many
    those are; without it the arm did not say, and the shares are of all drafts.
    """
    drafts = [cell.drafts for cell in cells if cell.drafts is not None]
    spans, tokens = sum(each.spans for each in drafts), sum(each.tokens for each in drafts)
    if not spans or not tokens:
        return None
    longest = max(len(each.accepted) for each in drafts)
    accepted = [sum(each.accepted[i] for each in drafts if i < len(each.accepted)) for i in range(longest)]
    drafted = [sum(each.drafted[i] for each in drafts if i < len(each.drafted)) for i in range(longest)]
    told = all(each.drafted or not each.spans for each in drafts)
    had_place = drafted if told else [spans] * longest
    return {
        "spans": spans,
        "acceptance_rate": _short(sum(accepted) / tokens),
        "mean_accepted_length": _short(1 + sum(accepted) / spans),
        "by_place": [_short(stood / had) for stood, had in zip(accepted, had_place, strict=True) if had],
        **({"drafted": drafted} if told else {}),
    }


def _pauses(cells: Sequence[Cell]) -> dict[str, float] | None:
    """What held up the arm's steps besides their work, in all its runs; None where it does not say."""
    told = [cell.pauses for cell in cells if cell.pauses is not None]
    names = dict.fromkeys(name for each in told for name in each)
    return {name: _short(sum(each.get(name, 0) for each in told)) for name in names} or None


def _parts(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """What the arm was doing: shares of the time, totals, and a timeline of its first run."""
    parts = [cell.parts for cell in cells if cell.parts is not None]
    found = pooled(parts, sum(cell.outcome.seconds for cell in cells if cell.parts is not None))
    if found is None:
        return None
    kept = ("at", "waiting", "prefill_lane", "decode_lane", "verify_lane", "drafted_n", "verdicts_n")
    line = {name: [_short(value) for value in parts[0].timeline[name]] for name in kept if name in parts[0].timeline}
    numbers = {
        name: {key: _short(value) for key, value in found[name].items()}
        for name in ("totals", "means", "peaks", "shares")
    }
    return {**numbers, "busy": _short(found["busy"]), "timeline": line}


# -- as text -----------------------------------------------------------------------------------------------------------


def as_csv(found: dict[str, Any]) -> str:
    """One line for each arm of each scenario, figures by name; ratios over the reference at the end."""
    lines = []
    for scenario, each in found["scenarios"].items():
        for arm, own in each["arms"].items():
            drafts = own["drafts"] or {}
            line = {"scenario": scenario, "arm": arm, "seeds": len(own["seeds"]), **own["figures"]}
            line |= {"acceptance_rate": drafts.get("acceptance_rate")}
            compared = each["compared"].get(arm, {})
            for metric in COMPARED:
                parts = compared.get(metric, {})
                if parts and not judged(parts):
                    parts = {name: parts[name] for name in ("ratio", "verdict")}
                line |= {
                    f"{metric}_over_reference_{part}": parts.get(part) for part in ("ratio", "low", "high", "verdict")
                }
            lines.append(line)
    if not lines:
        return ""
    text = io.StringIO()
    table = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return text.getvalue()


HEADER = (
    "arm", "tokens/s", "good/s", "TTFT p50 / p95, ms", "TPOT p50 / p95, ms", "E2E mean / p95, s", "gap p99, ms",
    "requests", "unfinished", "failed", "accepted", "plans that left a draft",
)  # fmt: skip


def row(arm: str, own: dict[str, Any]) -> tuple[str, ...]:
    """The figures of an arm in one scenario, as texts under `HEADER`."""
    f, drafts = own["figures"], own["drafts"]
    return (
        arm,
        f"{f['tok_s']:,.1f}",
        f"{f['goodput']:.2f}",
        f"{f['ttft_ms_p50']:.0f} / {f['ttft_ms_p95']:.0f}",
        f"{f['tpot_ms_p50']:.1f} / {f['tpot_ms_p95']:.1f}",
        f"{f['e2e_ms_mean'] / 1e3:.2f} / {f['e2e_ms_p95'] / 1e3:.2f}",
        f"{f['gap_ms_p99']:.0f}",
        str(f["requests"]),
        str(f["unfinished"]),
        str(f["failed"]),
        f"{drafts['acceptance_rate']:.0%}" if drafts else "–",
        _left(own.get("parts")),
    )


LATENCIES = ("arm", "TTFT, ms", "TPOT, ms", "E2E, s", "gap, ms")
ALL_LATENCIES = "All latencies: mean / p50 / p95 / p99, and the longest gap"


def latency_row(arm: str, own: dict[str, Any]) -> tuple[str, ...]:
    """All latencies of an arm in one scenario, as texts under `LATENCIES`."""
    f = own["figures"]

    def each(time: str, form: str, scale: float = 1.0, *more: str) -> str:
        names = [f"{time}_ms_{part}" for part in ("mean", "p50", "p95", "p99", *more)]
        return " / ".join(format(scale * f[name], form) for name in names)

    return arm, each("ttft", ".0f"), each("tpot", ".1f"), each("e2e", ".2f", 1e-3), each("gap", ".1f", 1.0, "max")


def _left(parts: dict[str, Any] | None) -> str:
    """`20 of 203 (10 %)`: plans that left a draft for a later verify."""
    totals = parts["totals"] if parts else {}
    if not totals.get("plans_n"):
        return "–"
    share = 100 * totals["plans_left_n"] / totals["plans_n"]
    told = f" ({share:.{0 if share >= 10 else 1}f} %)" if share else ""
    return f"{totals['plans_left_n']:.0f} of {totals['plans_n']:.0f}{told}"


def published(found: dict[str, Any], scenario: str) -> list[tuple[str, str]]:
    """What the original gives for this scenario: the figure's name, and its values."""
    pair, level = found["grid"].get(scenario, ("", ""))
    claims = (found.get("protocol") or {}).get("claims", {})
    rows = []
    for what, values in claims.items():
        value = values.get(level, values.get(f"{pair.partition(' ')[0]} {level}"))
        if value is not None:
            rows.append((what, " / ".join(f"{each:g}" for each in (value if isinstance(value, list) else [value]))))
    return rows


def ratio(each: dict[str, Any]) -> str:
    """`1.12 (1.05–1.19) faster`, or `1.12 one seed`."""
    spread = f" ({interval(each)})" if judged(each) else ""
    return f"{number(each['ratio'])}{spread} {each['verdict']}"


def judged(each: dict[str, Any]) -> bool:
    """Whether a comparison has an interval over seeds: one seed has none."""
    return bool(each["verdict"] != UNKNOWN)


def over_seeds(compared: Iterable[dict[str, Any]]) -> str:
    """What the intervals of some comparisons are over, in words."""
    seeds = max((each["seeds"] for each in compared if judged(each)), default=1)
    return f"95 % interval over {seeds} seeds" if seeds > 1 else "one seed, so no interval"


def interval(each: dict[str, Any]) -> str:
    """`1.05–1.19`."""
    return f"{number(each['low'])}–{number(each['high'])}"


def number(value: float) -> str:
    """A ratio, as exact as it is of use."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}" if value < 100 else "100+"


def false_alarms(found: dict[str, Any]) -> list[str]:
    """Where an arm is said to differ from itself."""
    return [
        f"{scenario}: {NAMES[metric]} {ratio(each)}"
        for scenario, one in found["scenarios"].items()
        for metric, each in one["itself"].items()
        if each["verdict"] in (FASTER, SLOWER)
    ]


def headlines(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The comparison that says most of an arm in a scenario: (scenario, arm, metric, ratio in words)."""
    for scenario, own in found["scenarios"].items():
        metric = telling(scenario)
        for arm, compared in own["compared"].items():
            if metric in compared:
                yield scenario, arm, metric, ratio(compared[metric])


def telling(scenario: str) -> str:
    """The figure that says most of a scenario: arrivals set the tokens/s of an open loop."""
    return "tok_s" if "closed" in scenario else "e2e_ms_mean"


def itself_line(found: dict[str, Any]) -> str:
    """What the arm that ran twice says of the others' figures."""
    made = [each for one in found["scenarios"].values() for each in one["itself"].values()]
    alarms = false_alarms(found)
    if not made:
        return "No arm ran twice: nothing says how much figures differ here by chance."
    told = sum(map(judged, made))
    if not told:
        return f"{found['control']} ran twice (A/A), but with one seed nothing can be judged."
    same = f"{told - len(alarms)} of {told} comparisons of it with itself"
    line = f"{found['control']} ran twice (A/A): {same} read “no difference”"
    if not alarms:
        return f"{line}, as they must."
    return f"{line}; these do not, so small differences of theirs are chance: {'; '.join(alarms)}."


def as_markdown(found: dict[str, Any]) -> str:
    """A summary."""
    last = found["sittings"][-1]
    cells = found["cells"]
    lines = ["# Benchmark", "", f"`{last['command']}`", ""]
    if not found["complete"]:
        lines += [
            f"**Partial: {cells['run']} of {cells['planned']} runs.** The same command goes on where it ended.",
            "",
        ]
    if found["note"]:
        lines += [f"**{found['note']}**", ""]
    for scenario, each in found["scenarios"].items():
        lines += [
            f"## {scenario}",
            "",
            *markdown_table(HEADER, [row(arm + mark(each, arm), own) for arm, own in each["arms"].items()]),
            "",
        ]
        latencies = [latency_row(arm + mark(each, arm), own) for arm, own in each["arms"].items()]
        lines += [f"{ALL_LATENCIES}:", "", *markdown_table(LATENCIES, latencies), ""]
        lines += [f"Published by the original, {what}: {text}\n" for what, text in published(found, scenario)]
        if each["compared"]:
            arms = list(each["compared"])
            spread = over_seeds(one for own in each["compared"].values() for one in own.values())
            lines += [f"Over {found['reference']} ({spread}):", ""]
            body = [
                (NAMES[metric], *(ratio(each["compared"][arm][metric]) for arm in arms))
                for metric in COMPARED
                if all(metric in each["compared"][arm] for arm in arms)
            ]
            lines += [*markdown_table(("", *(arm + mark(each, arm) for arm in arms)), body), ""]
    if (legend := said(found)) != "":
        lines += [legend, ""]
    if counts := won_rows(found):
        header, *body = counts
        lines += ["## Scenarios won and lost", "", *markdown_table(header, body), ""]
        lines += [APART, ""] if legend else []
    lines += [itself_line(found), "", f"Commit {last['commit'][:12]}, modified: {last['modified']}, {last['files']}."]
    return "\n".join(lines) + "\n"


WON = "faster / slower / no difference"


def won_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Arms; then by figure, and arm by arm: scenarios in which it was faster, slower, and neither, and those in which a
    PDV hardly pipelined. Nothing where one seed says none of them."""
    arms = count(found["scenarios"])

    def cell(own: dict[str, int] | None) -> str:
        if own is None:
            return "–"
        apart = f" + {own[HARDLY]}{MARK}" if own[HARDLY] else ""
        return " / ".join(str(own[word]) for word in (FASTER, SLOWER, NONE)) + apart

    metrics = [metric for metric in COMPARED if any(sum(own.get(metric, {}).values()) for own in arms.values())]
    body = [(NAMES[metric], *(cell(own.get(metric)) for own in arms.values())) for metric in metrics]
    return [(WON, *arms), *body] if body else []


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Its lines."""
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]
