"""Why arms win and lose, from what was measured of their parts; and which of the original's named modes are seen here.

An arm that drafts emits more tokens a pass and pays for drafts. Its time a token over that of `plain` is

    (seconds of passes + drafts + host, a token) / (those of `plain`)

so every sentence here is one of those quotients. Knows results; nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifypd.bench.campaign import Folder, write_whole
from verifypd.bench.pairs import sizes
from verifypd.bench.pipelining import pipelined
from verifypd.bench.protocols import PDV
from verifypd.bench.results import judged, markdown_table, ratio, results
from verifypd.bench.statistics import FASTER, NONE, SLOWER, UNKNOWN
from verifypd.errors import ConfigError

Row = tuple[str, dict[str, Any]]  # a scenario, and two arms' mean latencies compared
BALANCED, IMBALANCED = 2.0, 3.0  # size of a verifier over its draft's
KINDS = ("passes", "draft", "host")  # prompts ride in passes under some architectures
SEEN, NOT_SEEN, OPEN, UNJUDGED = "seen", "not seen", "not measured", "not judged"


@dataclass(frozen=True, slots=True)
class Account:
    """What an arm's time went to in one scenario, ms a token."""

    each: dict[str, float]  # by kind
    tokens_a_verdict: float  # that each request got from a pass
    draft_over_pass: float  # time of a draft loop over that of a verify pass; 0: nothing was drafted
    left: float  # share of plans that left a draft for a later verify
    queued: float  # share of a request's time before its first token

    @property
    def total(self) -> float:
        """ms a token, all kinds."""
        return sum(self.each.values())


def account(own: dict[str, Any]) -> Account | None:
    """Of an arm in one scenario; None where it does not say what it did."""
    parts, f = own["parts"], own["figures"]
    if parts is None or not f["output_tokens"]:
        return None
    totals = parts["totals"]
    shares = parts["shares"] | {"passes": parts["shares"]["prefill"] + parts["shares"]["verify"]}
    each = {name: 1e3 * shares[name] * f["seconds"] / f["output_tokens"] for name in KINDS}
    loops, passes = totals.get("draft_loops_n", 0), totals.get("passes_n", 0)
    loop = totals["draft_s"] / loops if loops else 0.0
    one = totals["verify_s"] / passes if passes else 0.0
    return Account(
        each,
        totals["continued_n"] / max(1.0, totals["verdicts_n"]),
        loop / one if one else 0.0,
        totals["plans_left_n"] / max(1.0, totals["plans_n"]),
        f["ttft_ms_mean"] / max(1e-9, f["e2e_ms_mean"]),
    )


def left_share(own: dict[str, Any]) -> float | None:
    """Of an arm's plans in one scenario, the share that left a draft for a later verify; None where it does not say."""
    totals = (own["parts"] or {"totals": {}})["totals"]
    return float(totals["plans_left_n"]) / max(1.0, totals["plans_n"]) if "plans_left_n" in totals else None


def three_lanes(own: dict[str, Any]) -> str | None:
    """The arm of a scenario that stands for PDV: the first that pipelined, else the first that ran."""
    there = [name for name in PDV if name in own["arms"]]
    return next((name for name in there if pipelined(own, name)), there[0] if there else None)


def never_pipelined(loads: int) -> str:
    """Why runs of PDV say nothing of it."""
    return f"PDV pipelined in none of {loads} loads"


def why(arm: str, own: Account, other: str, theirs: Account) -> str:
    """The differences of two arms' parts in words, the largest first."""
    parts = []
    if own.draft_over_pass:
        parts.append(
            f"{own.tokens_a_verdict:.2f} tokens a verdict against {theirs.tokens_a_verdict:.2f}; a draft loop takes"
            f" {own.draft_over_pass:.2f} of a pass"
        )
    moved = sorted(KINDS, key=lambda name: -abs(own.each[name] - theirs.each[name]))
    shown = [name for name in moved if abs(own.each[name] - theirs.each[name]) > 0.03 * max(theirs.total, 1e-9)][:3]
    parts += [f"{name} {own.each[name]:.2f} ms a token against {theirs.each[name]:.2f}" for name in shown]
    if abs(own.queued - theirs.queued) > 0.05:
        parts.append(
            f"{own.queued:.0%} of a request's time passes before its first token, {theirs.queued:.0%} under {other}"
        )
    if own.left:
        parts.append(f"{own.left:.0%} of its plans leave a draft for a later verify")
    return "; ".join(parts) or f"its parts are those of {other}"


def explained(found: dict[str, Any]) -> list[dict[str, str]]:
    """One line for each scenario and arm: the verdict on its mean latency, and where it comes from."""
    lines = []
    reference = found["reference"]
    for scenario, each in found["scenarios"].items():
        base = account(each["arms"][reference]) if reference in each["arms"] else None
        for arm, compared in each["compared"].items():
            own = account(each["arms"][arm])
            if own is None or base is None or "e2e_ms_mean" not in compared:
                continue
            verdict = compared["e2e_ms_mean"]
            lines.append(
                {"scenario": scenario, "arm": arm, "verdict": verdict["verdict"], "E2E": ratio(verdict),
                 "why": why(arm, own, reference, base)}
            )  # fmt: skip
    return lines


# -- the original's named modes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mode:
    """One of the original's statements, and what is seen of it."""

    name: str
    claim: str
    seen: str
    figures: str


def _level(found: dict[str, Any], scenario: str) -> int:
    """C or n of a scenario; 0: it has none."""
    level = found["grid"].get(scenario, ["", ""])[1].partition("=")[2]
    return int(level) if level.isdigit() else 0


def _compared(found: dict[str, Any], arm: str, other: str, within: Callable[[int], bool]) -> list[Row]:
    """Scenarios in which both ran: their mean latencies compared, where that was done."""
    rows = []
    for scenario, own in found["scenarios"].items():
        each = _over(found, own, arm, other)
        if within(_level(found, scenario)) and each is not None:
            rows.append((scenario, each))
    return rows


def _over(found: dict[str, Any], own: dict[str, Any], arm: str, other: str) -> dict[str, Any] | None:
    """An arm's mean latency over another's in a scenario; None where they were not compared."""
    compared = own["compared"] if other == found["reference"] else own.get(f"over_{other}", {})
    each: dict[str, Any] | None = compared.get(arm, {}).get("e2e_ms_mean")
    return each


def _lanes(
    found: dict[str, Any], name: str, claim: str, other: str, within: Callable[[str, int], bool], word: str
) -> Mode:
    """PDV over another arm, in the scenarios in which it pipelined."""
    rows, alike = [], 0
    for scenario, own in found["scenarios"].items():
        arm = three_lanes(own)
        each = _over(found, own, arm, other) if arm and within(scenario, _level(found, scenario)) else None
        if each is not None and arm is not None and pipelined(own, arm):
            rows.append((scenario, each))
        else:
            alike += each is not None
    return _judged(name, claim, rows, word) if rows or not alike else Mode(name, claim, OPEN, never_pipelined(alike))


def _judged(name: str, claim: str, rows: Sequence[Row], word: str) -> Mode:
    """Seen, where most of these comparisons say so; comparisons of one seed say nothing."""
    if not rows:
        return Mode(name, claim, OPEN, "no scenario here says")
    told = [row for row in rows if judged(row[1])]
    said = sum(each["verdict"] == word for _, each in told)
    shown = "; ".join(f"{scenario}: {ratio(each)}" for scenario, each in (told or rows)[:4])
    if not told:
        return Mode(name, claim, UNJUDGED, f"one seed cannot say (mean E2E: {shown})")
    return Mode(
        name, claim, SEEN if 2 * said > len(told) else NOT_SEEN, f"{word} in {said} of {len(told)} (mean E2E: {shown})"
    )


def named_modes(found: dict[str, Any]) -> list[Mode]:
    """The original's success and failure modes, each with a word and figures."""
    arms = {arm for each in found["scenarios"].values() for arm in each["arms"]}
    times = {name: sizes(pair) for name, (pair, _) in found["grid"].items()}

    def apart(scenario: str) -> float:
        """How many times its draft's size a verifier has; 0: not known."""
        return (times.get(scenario) or (0.0, 0.0))[1]

    slow = next((name for name in ("baseline", "plain") if name in arms), "plain")
    modes = [
        _lanes(found, "very high concurrency", "PDV is faster than PD at C ≥ 32", "pd", lambda _, c: c >= 32, FASTER),
        _lanes(found, "low concurrency", f"PDV is slower than {slow} under 5 requests", slow,
               lambda _, c: 0 < c < 5, SLOWER),
        _lanes(found, "overhead valley", "PDV is slower than PD at C = 6–16", "pd", lambda _, c: 6 <= c <= 16, SLOWER),
        _lanes(found, "medium concurrency, balanced models",
               f"PDV is slower than PD at C = 6–16 where the verifier is under {BALANCED:g} × its draft", "pd",
               lambda s, c: 6 <= c <= 16 and 0 < apart(s) < BALANCED, SLOWER),
        _lanes(found, "imbalanced sizes",
               f"PDV is faster than PD where the verifier is over {IMBALANCED:g} × its draft", "pd",
               lambda s, _: apart(s) > IMBALANCED, FASTER),
        _lanes(found, "PD's lock step", "PDV is faster than PD where requests are many", "pd",
               lambda _, c: c >= 10, FASTER),
        _lanes(found, "large verifiers", "PDV gains most with a 34B verifier", "pd", lambda s, _: "34b" in s, FASTER),
    ]  # fmt: skip
    return [*modes, _balanced(found), _idle_device(found), _poor_drafts(found)]


def shown_modes(found: dict[str, Any]) -> list[Mode]:
    """Those of a report: servers say nothing of lanes, so that theirs has only what it can judge."""
    servers = all("url" in (arm.get("spec") or {}) for arm in found["arms"].values())
    return [mode for mode in named_modes(found) if not (servers and mode.seen == OPEN)]


def _balanced(found: dict[str, Any]) -> Mode:
    same = [
        s for s, (pair, _) in found["grid"].items() if len(set(pair.partition(" ")[0].split(":"))) == 1 and ":" in pair
    ]
    rows = [row for row in _compared(found, "plain", "pd", lambda _: True) if row[0] in same]
    return _judged("verifier as small as its draft", "speculation loses: plain is faster than PD", rows, FASTER)


def _where_pd(found: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> list[Row]:
    """Plain over PD, in the scenarios in which something holds of PD's run."""
    pd = {name: each["arms"]["pd"] for name, each in found["scenarios"].items() if "pd" in each["arms"]}
    return [row for row in _compared(found, "plain", "pd", lambda _: True) if holds(pd[row[0]])]


def _idle_device(found: dict[str, Any]) -> Mode:
    rows = _where_pd(found, lambda own: own["parts"] is not None and own["parts"]["busy"] < 0.6)
    return _judged("under 60 % GPU use", "speculation loses: plain is faster than PD", rows, FASTER)


def _poor_drafts(found: dict[str, Any]) -> Mode:
    rows = _where_pd(found, lambda own: own["drafts"] is not None and own["drafts"]["acceptance_rate"] < 0.3)
    return _judged("poor speculation", "where few drafts are accepted, plain is faster than PD", rows, FASTER)


# -- as text -------------------------------------------------------------------------------------------------------


def as_markdown(found: dict[str, Any]) -> str:
    """Both tables."""
    lines = ["# Why arms win and lose", ""]
    if found.get("note"):
        lines += [f"*{found['note']}*", ""]
    rows = explained(found)
    heads = {FASTER: "Faster than", SLOWER: "Slower than", NONE: "No difference from", UNKNOWN: "One seed, beside"}
    for word, head in heads.items():
        own = [row for row in rows if row["verdict"] == word]
        if own:
            lines += [f"## {head} {found['reference']}", ""]
            lines += [*markdown_table(("scenario", "arm", "mean E2E", "why"),
                             [(r["scenario"], r["arm"], r["E2E"], r["why"]) for r in own]), ""]  # fmt: skip
    if not rows:
        lines += ["No arm here says what it was doing: servers do not, and engines of this process do.", ""]
    named = shown_modes(found)
    if named:
        lines += ["## The original's success and failure modes", ""]
        lines += markdown_table(
            ("mode", "its claim", "here", "figures"), [(m.name, m.claim, m.seen, m.figures) for m in named]
        )
    return "\n".join(lines).rstrip("\n") + "\n"


def write(folder: Path) -> str:
    """Make modes.md again from the runs that are there; returns it."""
    kept = Folder(folder)
    if not kept.head:
        raise ConfigError(f"{folder} holds no benchmark: there is no run.json in it")
    text = as_markdown(results(kept))
    write_whole(folder / "modes.md", text)
    return text
