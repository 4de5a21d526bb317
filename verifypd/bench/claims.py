"""What the original published, beside results: a word and figures for each claim, all of them from the results.

Its selection rules are in `advice`, its success and failure modes in `modes`. Knows results; nothing of engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verifypd.bench import advice
from verifypd.bench.meter import SETTLES
from verifypd.bench.modes import NOT_SEEN, OPEN, SEEN, UNJUDGED, Mode, never_pipelined, three_lanes
from verifypd.bench.part_charts import CLAIMED
from verifypd.bench.pipelining import pipelined
from verifypd.bench.protocols import PROTOCOLS
from verifypd.bench.results import judged, number
from verifypd.bench.statistics import FASTER, SLOWER, UNKNOWN

Results = Sequence[tuple[str, dict[str, Any]]]  # a protocol's letter, and a result of it
SYSTEMS = {"Baseline": "baseline", "PD": "pd", "PDV": "pdv pipelined"}
NEAR = 0.10  # a share of utilisation this close to the claimed one counts as it
YES, NO, UNTOLD = "yes", "no", "–"  # one seed has directions, no intervals
MORE_MEMORY = (0.02, 0.05)
BEST_RATIO = (3.0, 7.0)  # a verifier's size over its draft's
SWEEPS = {"tokens/s": ((5.19, 8.98), (5.62, 8.53), (5.18, 8.62)), "latency": ((18.1, 14.6), (17.9, 16.0), (17.4, 14.2))}


def _word(holds: bool) -> str:
    return SEEN if holds else NOT_SEEN


def _if_judged(verdicts: Sequence[str], word: str) -> str:
    """The word that comparisons lead to, unless all of them are of one seed, which judges nothing."""
    return word if any(each != UNKNOWN for each in verdicts) else UNJUDGED


def _own(founds: Results, arm: str) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Letter, scenario and the arm's own, wherever it ran."""
    for letter, found in founds:
        for scenario, own in found["scenarios"].items():
            if arm in own["arms"]:
                yield letter, scenario, own, own["arms"][arm]


def utilisation(founds: Results) -> Mode:
    """NVML's, by architecture: the median over those of a protocol's loads in which PDV pipelined."""
    shares: dict[str, list[tuple[float, ...]]] = {}
    alike = 0
    for letter, _, own, _ in _own(founds, SYSTEMS["PDV"]):
        each = [_busy(own["arms"][arm]) for arm in SYSTEMS.values() if arm in own["arms"]]
        known = tuple(share for share in each if share is not None)
        if len(known) < len(SYSTEMS):
            continue
        if pipelined(own, SYSTEMS["PDV"]):
            shares.setdefault(letter, []).append(known)
        else:
            alike += 1
    middle = {letter: [statistics.median(arm) for arm in zip(*rows, strict=True)] for letter, rows in shares.items()}
    claimed = [CLAIMED[arm] for arm in SYSTEMS.values()]
    close = [abs(a - b) <= NEAR for values in middle.values() for a, b in zip(values, claimed, strict=True)]
    said = "; ".join(f"{letter}: {_percents(values)}" for letter, values in middle.items())
    claim = f"{_percents(claimed)} for {' / '.join(SYSTEMS)}"
    return Mode("GPU utilisation", claim, _word(all(close)) if close else OPEN, _told(said, alike))


def _busy(own: dict[str, Any]) -> float | None:
    """None too where the runs were too short for the counter."""
    if not own["parts"] or own["figures"]["seconds"] < SETTLES * len(own["seeds"]):
        return None
    return own["parts"]["means"].get("gpu_utilization")


def _told(figures: str, alike: int) -> str:
    """Figures of the loads in which PDV pipelined, and in how many it planned as PD."""
    if not figures:
        return never_pipelined(alike) if alike else "no result has it"
    return f"{figures}; not counted: {alike} in which PDV hardly pipelined" if alike else figures


def _percents(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %"


def memory(founds: Results) -> Mode:
    """PDV's peak over PD's, where PDV pipelined."""
    more: dict[str, list[float]] = {}
    alike = 0
    for letter, _, own, pd in _own(founds, "pd"):
        arm = three_lanes(own)
        both = [_peak(own["arms"][arm]), _peak(pd)] if arm else []
        if arm and both and all(both):
            if pipelined(own, arm):
                more.setdefault(letter, []).append(both[0] / both[1] - 1)
            else:
                alike += 1
    every = [value for values in more.values() for value in values]
    low, high = MORE_MEMORY
    inside = sum(low <= round(value, 2) <= high for value in every)
    spans = "; ".join(f"{letter}: {_span(values)}" for letter, values in more.items())
    claim = f"PDV needs {100 * low:.0f}–{100 * high:.0f} % more than PD"
    said = f"at the peak, {spans}; so much in {inside} of {len(every)} loads" if every else ""
    return Mode("memory", claim, _word(2 * inside > len(every)) if every else OPEN, _told(said, alike))


def _peak(own: dict[str, Any]) -> float:
    return float((own["parts"] or {"peaks": {}})["peaks"].get("memory", 0.0))


def _span(values: Sequence[float]) -> str:
    low, high = (f"{100 * value:+.0f}".replace("-", "−").replace("−0", "0").replace("+0", "0")
                 for value in (min(values), max(values)))  # fmt: skip
    return f"{low} %" if low == high else f"{low} to {high} %"


def acceptance(chosen: Results, real: Results) -> Mode:
    """Of PD's drafts of four. chosen: where the rate was set; real: of models that drafted by themselves."""
    spans = [[each["drafts"]["acceptance_rate"] for *_, each in _own(founds, "pd")] for founds in (chosen, real)]
    shown = [f"{100 * min(own):.0f}–{100 * max(own):.0f} %" for own in spans]
    said = f"set to that here ({shown[0]}); the built-in pair on a CPU: {shown[1]}; its pairs' own weights were not run"
    return Mode("acceptance", "40–42 % of four draft tokens", OPEN, said)


def decode_tails(found: dict[str, Any]) -> Mode:
    """Mixed traffic: PDV's times between tokens over the reference's, where it pipelined."""
    told, verdicts, alike = [], [], 0
    names = {"tpot_ms_p95": "TPOT p95", "gap_ms_p99": "gap p99"}
    for scenario, own in found["scenarios"].items():
        arm = three_lanes(own)
        if arm is None or not pipelined(own, arm):
            alike += arm is not None
            continue
        each = {name: own["compared"][arm][figure] for figure, name in names.items()}
        verdicts += [one["verdict"] for one in each.values()]
        words = (f"{name} {number(one['ratio'])}{_aside(one)}" for name, one in each.items())
        told.append(f"{scenario.partition(',')[0]}: {', '.join(words)}")
    claim = "PDV's decode latency stays low where the baseline's spikes"
    where = "simulated, " if found.get("note", "").startswith("SIMULATED") else ""
    said = f"{where}over {found['reference']}: {'; '.join(told)}" if told else ""
    word = _if_judged(verdicts, _word(2 * verdicts.count(FASTER) > len(verdicts))) if told else OPEN
    return Mode("stable p95", claim, word, _told(said, alike))


def _aside(each: dict[str, Any]) -> str:
    return f" ({each['verdict']})" if each["verdict"] in (FASTER, SLOWER) else ""


def won(founds: Sequence[dict[str, Any]]) -> Mode:
    """Scenarios in which PDV is faster than PD."""
    rows = [row for found in founds for row in advice.rule_verdicts(found)]
    told = [row["measured"] for row in rows if row["readme verdict"] != advice.ALIKE]
    faster, slower = told.count(FASTER), told.count(SLOWER)
    said = (
        f"A and B, simulated: PDV pipelined in {len(told)} of {len(rows)}; faster than PD in {faster} of these, slower"
        f" in {slower}"
    )
    word = _if_judged(told, _word(2 * faster > len(told))) if told else OPEN
    return Mode("scenarios won", "PDV wins 20 of 32", word, said)


def sweep(found: dict[str, Any]) -> list[Mode]:
    """Where tokens/s peak, and what PDV gains over PD where it pipelined."""
    peaks, words, every = {"pd": (0.0, "–"), "pdv": (0.0, "–")}, [], 0
    for scenario, own in found["scenarios"].items():
        arm, level = three_lanes(own), found["grid"][scenario][1]
        ran = {"pd": "pd"} | ({"pdv": arm} if arm and pipelined(own, arm) else {})
        for name, each in ran.items():
            if each in own["arms"]:
                peaks[name] = max(peaks[name], (own["arms"][each]["figures"]["tok_s"], level))
        compared = advice.over_pd(found, own, arm) if arm else None
        every += compared is not None
        if compared is not None and "pdv" in ran:
            words.append(compared["verdict"])
    changes = (f"{what} {' / '.join(_change(new / old) for old, new in each)}" for what, each in SWEEPS.items())
    claim = f"PDV over PD, mean of all C, three pairs: {', '.join(changes)}"
    said = f"faster than PD in {words.count(FASTER)} of {len(words)} loads" if words else ""
    word = _if_judged(words, _word(2 * words.count(FASTER) > len(words))) if words else OPEN
    (_, pd), (_, pdv) = peaks["pd"], peaks["pdv"]
    seen = OPEN if "–" in (pd, pdv) else _word((pd, pdv) == ("C=16", "C=64"))
    return [
        Mode("peak of tokens/s", "PD's at C = 16, PDV's at C = 64", seen,
             f"simulated: PD at {pd}, PDV, where it pipelined, at {pdv}; arrivals set them"),
        Mode("sweep", claim, word, f"simulated: {_told(said, every - len(words))}"),
    ]  # fmt: skip


def waiting(found: dict[str, Any]) -> Mode:
    """A hand-over from lane to lane: polled every 10 µs, or notified."""
    times = {(each["wait"], each["work_ms"]): each["hand_over_us"] for each in found["ring"]}
    works = sorted({work for _, work in times})
    better = sum(times["poll", work] < times["condition", work] for work in works)
    polled, told = (" / ".join(f"{times[wait, work]:.0f}" for work in works) for wait in ("poll", "condition"))
    said = f"a hand-over between threads on a CPU: polled {polled} µs, notified {told} µs"
    claim = "polling every 10 µs beats condition variables"
    return Mode("spin polling", claim, _word(2 * better > len(works)), said)


def queue_depth(found: dict[str, Any]) -> Mode:
    """Other depths over the advised one, by mean E2E."""
    told, words = [], []
    for arm in found["arms"]:
        if arm == found["reference"]:
            continue
        each = [own["compared"][arm]["e2e_ms_mean"] for own in found["scenarios"].values()]
        words += [one["verdict"] for one in each]
        told.append(f"{arm.split()[-1]}: {', '.join(number(one['ratio']) + _aside(one) for one in each)}")
    levels = " and ".join(found["grid"][scenario][1] for scenario in found["scenarios"])
    advised = found["reference"].split()[-1]
    said = f"B, {levels}, simulated: mean E2E over that at {advised} is {'; '.join(told)}"
    claim = f"{advised} × the batch is best (1.0–2.0)"
    word = NOT_SEEN if FASTER in words else "no other depth is faster"
    return Mode("queue depth", claim, _if_judged(words, word), said)


def batch_sizes(found: dict[str, Any]) -> Mode:
    """Whether a batch smaller than the largest is faster at some load; only where both pipelined, or neither."""
    words = [word for load in advice.batch_loads(found) for word in load.verdicts]
    said = (
        "E, simulated: among limits at which PDV pipelined, and among those at which it hardly did, a smaller one is"
        f" faster than the largest in {words.count(FASTER)} of {len(words)} comparisons"
    )
    return Mode("dynamic batch sizes", "smaller batches at lower loads", _any_faster(words), said)


def _any_faster(words: Sequence[str]) -> str:
    return _if_judged(words, _word(FASTER in words)) if words else OPEN


def batches(load: advice.BatchLoad) -> Mode:
    """The same of one load, with every batch; ° marks those at which PDV hardly pipelined."""
    kinds = []
    for kind in load.kinds:
        mark = "" if kind.pipelined else "°"
        words = (f" ({each.verdict})" if each.verdict else "" for each in kind.limits)
        limits = (f"{each.size}: {seconds(each.mean)}{mark}" for each in kind.limits)
        kinds.append(", ".join(map("".join, zip(limits, words, strict=True))))
    claim = f"smaller batches at lower loads (16 at C = 16–32, 32 at C ≥ 32, 64 at C ≥ 64): at {load.level}"
    return Mode("batch sizes", claim, _any_faster(load.verdicts), "; ".join(kinds))


def seconds(ms: float) -> str:
    """A time; from ten seconds on in these."""
    return f"{ms / 1e3:.2f} s" if ms >= 1e4 else f"{ms:.0f} ms"


def best_ratio(found: dict[str, Any]) -> Mode:
    """Where drafting pays most, by what plain takes over PD: at a verifier of 3 to 7 times its draft, or elsewhere."""
    low, high = BEST_RATIO
    pairs = [(size, dict(levels)) for _, size, levels in advice.gains(found)]
    words = []
    for level in dict.fromkeys(level for _, levels in pairs for level in levels):
        inside, outside = (
            [levels[level] for size, levels in pairs if (low <= size <= high) is within and level in levels]
            for within in (True, False)
        )
        if inside and outside:
            words.append(_most(inside, outside))
    said = "plain over PD: " + ", ".join(f"{_range(levels.values())} at {size:.0f} ×" for size, levels in pairs)
    told = [word for word in words if word != UNKNOWN]
    if told:
        yes, no = told.count(YES), told.count(NO)
        said += f"; PD certainly gains most at {low:g}–{high:g} × in {yes} of {len(told)} loads, elsewhere in {no}"
    word = _if_judged(words, _word(2 * told.count(YES) > len(told))) if words else OPEN
    return Mode("size ratio", f"best at {low:g}–{high:g} × the draft's size", word, said)


def _most(inside: Sequence[dict[str, Any]], outside: Sequence[dict[str, Any]]) -> str:
    """Whether the largest gain of a load is inside; untold where intervals meet."""
    if not all(judged(each) for each in (*inside, *outside)):
        return UNKNOWN
    for ones, others, word in ((inside, outside, YES), (outside, inside, NO)):
        if max(each["low"] for each in ones) > max(each["high"] for each in others):
            return word
    return UNTOLD


def _range(compared: Iterable[dict[str, Any]]) -> str:
    ratios = [each["ratio"] for each in compared]
    return f"{min(ratios):.2f}–{max(ratios):.2f}"


# -- B, C and D --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One load: figures over Baseline's, as published and as measured."""

    scenario: str
    published: dict[str, dict[str, float]]  # by figure, then by PD or PDV
    measured: dict[str, dict[str, float]]  # by figure, then by arm
    over_baseline: str  # whether PDV's p95 moves the published way
    over_pd: str


def published_changes(found: dict[str, Any]) -> list[Change]:
    """Of every load of B, C or D for which the original has figures."""
    protocol = next(each for each in PROTOCOLS.values() if each.letter == found["protocol"]["letter"])
    made = []
    for scenario, own in found["scenarios"].items():
        pair, level = found["grid"][scenario]
        keys = (level, f"{pair.partition(' ')[0]} {level}")
        claimed: dict[str, dict[str, float]] = {}
        for what, values in protocol.claims.items():
            value = next((values[key] for key in keys if key in values), None)
            if value is not None:
                claimed[_figure(what)] = claimed.get(_figure(what), {}) | _over_first(value)
        if "baseline" in own["arms"] and claimed:
            measured = {figure: _over(own, figure) for figure in ("e2e_ms_p95", "tok_s")}
            words = _directions(own, claimed.get("e2e_ms_p95", {}), measured["e2e_ms_p95"])
            made.append(Change(scenario, claimed, measured, *words))
    return made


def _figure(what: str) -> str:
    return "e2e_ms_p95" if what.startswith("P95") else "tok_s"


def _over_first(value: Any) -> dict[str, float]:
    """[Baseline, PD, PDV] or [Baseline, PDV] as ratios; one number is PDV's ratio."""
    if not isinstance(value, list):
        return {"PDV": value}
    first, *others = value
    return dict(zip(("PD", "PDV")[-len(others) :], (each / first for each in others), strict=True))


def _over(own: dict[str, Any], figure: str) -> dict[str, float]:
    base = own["arms"]["baseline"]["figures"][figure]
    arms = [arm for arm in ("pd", "pdv whole", "pdv pipelined") if arm in own["arms"]]
    return {arm: own["arms"][arm]["figures"][figure] / base for arm in arms}


def _directions(own: dict[str, Any], said: dict[str, float], here: dict[str, float]) -> tuple[str, str]:
    """Whether PDV's p95 moves the published way, over Baseline's and over PD's; untold where PDV hardly pipelined."""
    three = here.get("pdv pipelined")
    if three is None or "PDV" not in said or not pipelined(own, "pdv pipelined"):
        return UNTOLD, UNTOLD
    over_baseline = YES if (said["PDV"] < 1) == (three < 1) else NO
    if "PD" not in said or "pd" not in here:
        return over_baseline, UNTOLD
    return over_baseline, YES if (said["PDV"] < said["PD"]) == (three < here["pd"]) else NO


def change_texts(ratios: dict[str, float], names: Sequence[str]) -> str:
    """`−50 % / +8 %`; a dash for what is not there."""
    return " / ".join(_change(ratios[name]) if name in ratios else "–" for name in names)


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+,.0f} %".replace("-", "−")
