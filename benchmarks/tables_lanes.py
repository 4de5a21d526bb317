"""Tables of the architectures, and of what the original says of them: its metric, its rules, its claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cells import TAIL_FIGURES, TAIL_RATIOS, TAILS, ratios, read, rows, source, tails

from verifypd.bench import advice, claims, modes, pipelining
from verifypd.bench.figures import Outcome, Record, cut, figures

SWEEP, MIXED, BATCHES = "simulated-sweep-h200", "simulated-mixed-h200", "simulated-batches-h200"
THREE, POOR = "simulated-three-way-h200", "simulated-poor-drafts-h200"
FEW, MEDIUM = "simulated-low-h200", "simulated-medium-h200"
MODELS, EVERY = "simulated-models-h200", "simulated-comprehensive-h200"
RULED = (SWEEP, THREE, FEW, MEDIUM)
NAMED = {"A": SWEEP, "B": THREE, "B, n = 2 to 4": FEW, "B, TinyLlama drafts for itself, n = 6 to 16": MEDIUM}
MIXED_H200, SWEEP_H200 = "bench-mixed-h200", "bench-sweep-h200"
THREE_H200, EVERY_H200 = "bench-three-way-h200", "bench-comprehensive-h200"


def original_metric() -> str:
    """One arm that ran twice, cut off at three times: all tokens of the window, and those of finished requests."""
    found = read("bench-original-metric")
    one, two = (Outcome.unpacked(run) for run in found["runs"].values())
    lines = []
    for seconds in (39.0, 39.5, 45.0):
        both = [figures([cut(each, seconds)]) for each in (one, two)]
        line = [f"{seconds:g} s"]
        for figure in ("tok_s", "tok_s_original"):
            first, second = (each[figure] for each in both)
            more = f"{100 * (second / first - 1):+,.0f} %" if first else "from nothing"
            line += [f"{first:.1f}", f"{second:.1f}", more]
        lines.append(line)
    header = ["cut off at", "all tokens/s: once", "again", "", "of finished requests: once", "again", ""]
    return rows(header, lines) + source("bench-original-metric")


def equal_systems() -> tuple[Outcome, Outcome]:
    """Two systems that emit 100 tokens/s for 50 requests of 20 tokens that came at once: in turn, and all together."""
    in_turn = [[(20 * i + k + 1) / 100 for k in range(20)] for i in range(50)]
    together = [[(50 * k + i + 1) / 100 for k in range(20)] for i in range(50)]

    def whole(outputs: list[list[float]]) -> Outcome:
        return Outcome(tuple(Record(0.0, 0.0, tuple(each), 20, 1, True) for each in outputs), 50, 10.0)

    return whole(in_turn), whole(together)


def equal_metric() -> str:
    """What the original's metric makes of them at some cut-offs."""
    lines = []
    for seconds in (9.505, 9.515, 9.535, 9.75, 10.0):
        one, two = (figures([cut(each, seconds)]) for each in equal_systems())
        line = [f"{seconds:g} s", f"{two['tok_s']:.0f}", f"{one['tok_s']:.0f}", f"{two['tok_s_original']:.1f}"]
        more = one["tok_s_original"] / two["tok_s_original"] - 1 if two["tok_s_original"] else None
        lines.append(
            [*line, f"{one['tok_s_original']:.1f}", "from nothing" if more is None else f"{100 * more:+,.0f} %"]
        )
    header = ["cut off at", "all tokens/s: together", "in turn", "of finished requests: together", "in turn", ""]
    return rows(header, lines)


def deploy(*names: str) -> Callable[[], str]:
    """Mean E2E of every arm in every scenario of some results; of one scenario the later. The lowest is named where
    there is more than one seed."""

    def table() -> str:
        founds = [read(name) for name in names]
        arms = list(dict.fromkeys(arm for found in founds for arm in found["arms"]))
        lines = []
        several = max(len(found["seeds"]) for found in founds) > 1
        scenarios = {name: own for found in founds for name, own in found["scenarios"].items()}
        of = {name: found for found in founds for name in found["scenarios"]}
        for scenario, own in scenarios.items():
            cells = []
            for arm in arms:
                each = own["arms"].get(arm)
                word = own["compared"].get(arm, {}).get("e2e_ms_mean", {}).get("verdict", "")
                mark = {"faster": " ↓", "slower": " ↑"}.get(word, "")
                text = claims.seconds(each["figures"]["e2e_ms_mean"]) if each else ""
                cells.append(text + mark + pipelining.mark(own, arm) if each else "–")
            lines.append([scenario, *cells, *([advice.lowest_text(of[scenario], own)] if several else [])])
        said = "; ".join(dict.fromkeys(f"{_note(found)}; against {found['reference']}" for found in founds))
        said += _legend(lines)
        header = ["mean E2E", *arms, *(["lowest"] if several else [])]
        words = "↓ faster, ↑ slower at 95 %; lowest: all that no arm certainly beats (level: every arm)"
        words = words if several else "One seed: no verdicts"
        return rows(header, lines) + f"\n{words}. {said}.{_left(scenarios)}\n" + source(*names)

    return table


def _legend(lines: list[list[str]]) -> str:
    """What the mark says, where a table has it."""
    marked = any("°" in cell for line in lines for cell in line)
    return (
        ". ° PDV hardly pipelined: under a twentieth of its plans left a draft for a later verify pass"
        if marked
        else ""
    )


def _left(scenarios: dict[str, Any]) -> str:
    """Of each PDV that pipelined, the share of its plans that left drafts for a later verify pass, by load."""
    shares: dict[str, dict[str, list[float]]] = {}
    for scenario, own in scenarios.items():
        for arm in own["arms"]:
            share = modes.left_share(own["arms"][arm]) if arm.startswith("pdv") else None
            if share is not None:
                shares.setdefault(arm, {}).setdefault(scenario.split(",")[0], []).append(share)
    said = [
        f"`{arm}` {', '.join(f'{load} {_percents(each)}' for load, each in loads.items())}"
        for arm, loads in shares.items()
        if max(max(each) for each in loads.values()) >= pipelining.LEAST_LEFT
    ]
    return f" Plans that left a draft for a later verify pass: {'; '.join(said)}." if said else ""


def _percents(shares: list[float]) -> str:
    low, high = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _note(found: dict[str, Any]) -> str:
    """What is random, shrunk or set, in today's words."""
    return str(found["note"]).replace("drafts stand by", "drafts accepted by")


def deploy_tails() -> str:
    """Mixed traffic on a GPU: what every arm reached, and its tails over those of the reference."""
    found = read(MIXED_H200)
    lines = []
    for scenario, own in found["scenarios"].items():
        rate = scenario.partition(",")[0].removeprefix("E ").removesuffix("/s")
        for arm, each in own["arms"].items():
            whole, *compared = ratios(own["compared"].get(arm), "e2e_ms_mean", *TAIL_FIGURES)
            mean = f"{each['figures']['e2e_ms_mean']:,.0f}"
            name = f"`{arm}`{pipelining.mark(own, arm)}"
            lines.append([rate, name, mean, *tails(each["figures"]), whole, *compared])
    header = ["requests/s", "arm", "mean E2E, ms", *TAILS, "× mean E2E", *TAIL_RATIOS]
    said = f"{_note(found)}; over {found['reference']}{_legend(lines)}"
    return rows(header, lines) + f"\n{said}.\n" + source(MIXED_H200)


def deploy_rules() -> str:
    """The original's selection rules against what was measured."""
    founds = [read(name) for name in RULED]
    lines = []
    for variant, counts in advice.rule_counts(founds).items():
        right, wrong = counts[advice.RIGHT], counts[advice.WRONG]
        more = ("right", "wrong") if right > wrong else ("wrong", "right")
        word = "as good as chance" if right == wrong else "oftener {} than {}".format(*more)
        told = right + wrong + counts[advice.EITHER]
        word = f"{word if right + wrong else 'not tested'}: {told} judged of {counts.total()}"
        figures = [str(counts[each]) for each in (advice.RIGHT, advice.WRONG, advice.EITHER, advice.ALIKE)]
        lines.append([f"`{variant}`", *figures, word])
    header = ["rule", "its choice was the faster one", "the slower one", "no difference", advice.ALIKE, "verdict"]
    return rows(header, lines) + source(*RULED)


def deploy_claims() -> str:
    """Its other statements, each with figures and a word."""
    sweep, batches = read(SWEEP), read(BATCHES)
    lines = []
    told = [(name, modes.named_modes(read(of))) for name, of in NAMED.items()]
    poor = {mode.name: mode for mode in modes.named_modes(read(POOR))}
    for own in zip(*(each for _, each in told), strict=True):
        said = [(letter, mode) for (letter, _), mode in zip(told, own, strict=True) if mode.seen != modes.OPEN]
        other = poor[own[0].name]
        alike = [
            (letter, mode) for (letter, _), mode in zip(told, own, strict=True) if "pipelined in none" in mode.figures
        ]
        rest = alike or [("A", own[0]) if other.seen == modes.OPEN else ("B, α = 0.3", other)]
        for letter, mode in said or rest[:1]:
            figures = mode.figures.partition(" (mean E2E")[0]
            lines.append([f"{mode.name}: {mode.claim}", f"{letter}: {figures}", mode.seen])
    ratio = claims.best_ratio(sweep)
    lines.append([ratio.claim, f"A: {ratio.figures}", ratio.seen])
    costs = ", ".join(f"{share:.2f} at {count}" for count, share in advice.verification_cost())
    claim = "four times the verification for nearly one request's cost"
    most = max(count for count, share in advice.verification_cost() if share < 1.25)
    lines.append([claim, f"five tokens a request over one: {costs} requests", f"holds up to about {most} requests"])
    sizes = [claims.batches(load) for load in advice.batch_loads(batches)]
    lines += [[each.claim, f"E: {each.figures}", each.seen] for each in sizes]
    legend = (
        "\n° PDV hardly pipelined. The word in brackets is over the largest batch of the same kind. A batch at which it"
        " pipelined is not compared with one at which it ran as PD, for there the architecture differs too. E has no C:"
        " its loads are requests/s. Costs of verification are those of passes with a head.\n"
    )
    return (
        rows(["its claim", "here", "verdict"], lines)
        + legend
        + source(SWEEP, THREE, FEW, MEDIUM, POOR, BATCHES, "h200-head-steps")
    )
