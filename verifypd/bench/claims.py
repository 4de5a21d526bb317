"""What the original published, beside results: a word and figures for each claim, all of them from the results.

Its selection rules are in `advice`, its success and failure modes in `modes`. Knows results; nothing of engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verifypd.bench import advice
from verifypd.bench.modes import NOT_SEEN, OPEN, SEEN, UNJUDGED, Mode, pipelined
from verifypd.bench.part_charts import CLAIMED
from verifypd.bench.protocols import PROTOCOLS
from verifypd.bench.results import number
from verifypd.bench.statistics import FASTER, SLOWER, UNKNOWN

Results = Sequence[tuple[str, dict[str, Any]]]  # a protocol's letter, and a result of it
SYSTEMS = {"Baseline": "baseline", "PD": "pd", "PDV": "pdv pipelined"}
NEAR = 0.10  # a share of utilisation this close to the claimed one counts as it
YES, NO, UNTOLD = "yes", "no", "–"  # one seed has directions, no intervals
MORE_MEMORY = (0.02, 0.05)
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
    """NVML's, by architecture: the median over a protocol's loads."""
    shares: dict[str, list[float]] = {}
    for arm in SYSTEMS.values():
        by_letter: dict[str, list[float]] = {}
        for letter, _, _, each in _own(founds, arm):
            if each["parts"] and "gpu_utilization" in each["parts"]["means"]:
                by_letter.setdefault(letter, []).append(each["parts"]["means"]["gpu_utilization"])
        for letter, values in by_letter.items():
            shares.setdefault(letter, []).append(statistics.median(values))
    whole = {letter: values for letter, values in shares.items() if len(values) == len(SYSTEMS)}
    claimed = [CLAIMED[arm] for arm in SYSTEMS.values()]
    close = [abs(a - b) <= NEAR for values in whole.values() for a, b in zip(values, claimed, strict=True)]
    said = "; ".join(f"{letter}: {_percents(values)}" for letter, values in whole.items())
    claim = f"{_percents(claimed)} for {' / '.join(SYSTEMS)}"
    return Mode("GPU utilisation", claim, _word(all(close)) if close else OPEN, said or "no result has it")


def _percents(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %"


def memory(founds: Results) -> Mode:
    """PDV's peak over PD's."""
    more: dict[str, list[float]] = {}
    for arm in ("pdv", "pdv pipelined"):
        for letter, _, own, each in _own(founds, arm):
            if "pd" in own["arms"]:
                both = [_peak(each), _peak(own["arms"]["pd"])]
                if all(both):
                    more.setdefault(letter, []).append(both[0] / both[1] - 1)
    every = [value for values in more.values() for value in values]
    low, high = MORE_MEMORY
    inside = sum(low <= round(value, 2) <= high for value in every)
    spans = "; ".join(f"{letter}: {_span(values)}" for letter, values in more.items())
    claim = f"PDV needs {100 * low:.0f}–{100 * high:.0f} % more than PD"
    said = f"at the peak, {spans}; so much in {inside} of {len(every)} loads" if every else "no result has it"
    return Mode("memory", claim, _word(2 * inside > len(every)) if every else OPEN, said)


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


def decode_tails(found: dict[str, Any], arm: str = "pdv") -> Mode:
    """Mixed traffic: PDV's times between tokens over the reference's."""
    told, verdicts = [], []
    names = {"tpot_ms_p95": "TPOT p95", "gap_ms_p99": "gap p99"}
    for scenario, own in found["scenarios"].items():
        each = {name: own["compared"][arm][figure] for figure, name in names.items()}
        verdicts += [one["verdict"] for one in each.values()]
        words = (f"{name} {number(one['ratio'])}{_aside(one)}" for name, one in each.items())
        told.append(f"{scenario.partition(',')[0]}: {', '.join(words)}")
    claim = "PDV's decode latency stays low where the baseline's spikes"
    said = f"over {found['reference']}: {'; '.join(told)}"
    return Mode("stable p95", claim, _if_judged(verdicts, _word(2 * verdicts.count(FASTER) > len(verdicts))), said)


def _aside(each: dict[str, Any]) -> str:
    return f" ({each['verdict']})" if each["verdict"] in (FASTER, SLOWER) else ""


def won(founds: Sequence[dict[str, Any]]) -> Mode:
    """Scenarios in which PDV is faster than PD."""
    rows = [row for found in founds for row in advice.rule_verdicts(found)]
    alike = sum(row["readme verdict"] == advice.ALIKE for row in rows)
    told = [row["measured"] for row in rows if row["readme verdict"] != advice.ALIKE]
    faster, slower = told.count(FASTER), told.count(SLOWER)
    said = (
        f"A and B, simulated: faster than PD in {faster}, slower in {slower}, planned as PD in {alike} of {len(rows)}"
    )
    word = _if_judged(told, _word(2 * faster > len(rows))) if told else OPEN
    return Mode("scenarios won", "PDV wins 20 of 32", word, said)


def sweep(found: dict[str, Any]) -> list[Mode]:
    """Where tokens/s peak, and what PDV gains over PD."""
    peaks = {}
    for arm in ("pd", "pdv"):
        levels = [(each["figures"]["tok_s"], found["grid"][scenario][1])
                  for _, scenario, _, each in _own([("A", found)], arm)]  # fmt: skip
        peaks[arm] = max(levels)[1] if levels else "–"
    every = [own for own in found["scenarios"].values() if advice.over_pd(found, own, "pdv") is not None]
    words = [(advice.over_pd(found, own, "pdv") or {})["verdict"] for own in every if pipelined(own, "pdv")]
    changes = (f"{what} {' / '.join(_change(new / old) for old, new in each)}" for what, each in SWEEPS.items())
    claim = f"PDV over PD, mean of all C, three pairs: {', '.join(changes)}"
    alike = f"simulated: PDV pipelined in none of {len(every)} loads: it planned as PD does"
    said = f"simulated: faster than PD in {words.count(FASTER)} of {len(words)} loads" if words else alike
    word = _if_judged(words, _word(2 * words.count(FASTER) > len(words))) if words else OPEN
    return [
        Mode("peak of tokens/s", "PD's at C = 16, PDV's at C = 64", _word(peaks == {"pd": "C=16", "pdv": "C=64"}),
             f"simulated: PD at {peaks['pd']}, PDV at {peaks['pdv']}; arrivals set them"),
        Mode("sweep", claim, word, said),
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
    """Whether a batch smaller than the largest is faster at some load."""
    words = [word for _, arms in advice.batch_verdicts(found) for name, (_, word) in arms.items()
             if name != found["reference"]]  # fmt: skip
    most = found["reference"].split()[-1]
    said = f"E, simulated: a limit below {most} is faster in {words.count(FASTER)} of {len(words)} comparisons"
    word = _if_judged(words, _word(FASTER in words))
    return Mode("dynamic batch sizes", "smaller batches at lower loads", word, said)


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
    """Whether PDV's p95 moves the published way: over Baseline's, and over PD's where PDV pipelined."""
    three = here.get("pdv pipelined")
    if three is None or "PDV" not in said:
        return UNTOLD, UNTOLD
    over_baseline = YES if (said["PDV"] < 1) == (three < 1) else NO
    if "PD" not in said or "pd" not in here or not pipelined(own, "pdv pipelined"):
        return over_baseline, UNTOLD
    return over_baseline, YES if (said["PDV"] < said["PD"]) == (three < here["pd"]) else NO


def change_texts(ratios: dict[str, float], names: Sequence[str]) -> str:
    """`−50 % / +8 %`; a dash for what is not there."""
    return " / ".join(_change(ratios[name]) if name in ratios else "–" for name in names)


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+,.0f} %".replace("-", "−")
