"""Why arms win and lose, and whether the original's advice holds: from planted figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from verifypd.bench import advice, modes, part_charts, results, svg
from verifypd.bench.meter import Meter, Parts, pooled
from verifypd.bench.pipelining import pipelined
from verifypd.bench.tuned import POLICIES
from verifypd.errors import ConfigError


def arm(e2e: float, draft: float = 0.0, left: int = 0, busy: float = 0.9) -> dict[str, Any]:
    """An arm that emitted 100 tokens in 10 s: one second of passes a ms of `e2e`, `draft` s of drafts."""
    totals = {"draft_s": draft, "verify_s": 4.0, "draft_loops_n": 10.0 if draft else 0.0, "passes_n": 40.0,
              "plans_n": 40.0, "plans_left_n": float(left), "continued_n": 80.0, "verdicts_n": 40.0}  # fmt: skip
    shares = {"prefill": 0.1, "draft": draft / 10, "verify": 0.4, "host": 0.05, "idle": 0.45 - draft / 10}
    figures = {"output_tokens": 100, "seconds": 10.0, "ttft_ms_mean": 0.2 * e2e, "e2e_ms_mean": e2e}
    drafts = {"acceptance_rate": 0.2, "spans": 10, "by_place": [0.5]} if draft else None
    parts = {"totals": totals, "shares": shares, "busy": busy, "means": {}, "peaks": {}, "timeline": {}}
    return {"figures": figures, "parts": parts, "drafts": drafts}


def compared(ratio: float, verdict: str) -> dict[str, Any]:
    return {"e2e_ms_mean": {"ratio": ratio, "low": ratio, "high": ratio, "verdict": verdict}}


def found(level: str, ratio: float, verdict: str, pair: str = "tinyllama-1.1b:llama-2-7b") -> dict[str, Any]:
    """A sweep of one scenario: pdv over pd as planted; plain takes 1.5 of pd's time."""
    own = {
        "arms": {"pd": arm(100.0, 1.0), "plain": arm(150.0), "pdv": arm(100.0 * ratio, 1.0, left=20)},
        "compared": {"pdv": compared(ratio, verdict), "plain": compared(1.5, "slower")},
        "over_pd": {},
    }
    return {
        "reference": "pd", "arms": {"pd": {}, "plain": {}, "pdv": {}}, "note": "planted", "grid": {"s": [pair, level]},
        "scenarios": {"s": own}, "won_and_lost": {},
    }  # fmt: skip


def test_an_account_is_time_a_token() -> None:
    own = modes.account(arm(100.0, 1.0, left=20))
    assert own is not None
    assert own.each == pytest.approx({"passes": 50.0, "draft": 10.0, "host": 5.0}) and own.total == pytest.approx(65.0)
    assert (own.tokens_a_verdict, own.draft_over_pass, own.left, own.queued) == pytest.approx((2.0, 1.0, 0.5, 0.2))
    assert modes.account({**arm(1.0), "parts": None}) is None


def test_the_reason_names_the_parts_that_moved() -> None:
    [pdv, plain] = modes.explained(found("C=64", 0.8, "faster"))
    assert pdv["verdict"] == "faster" and "50% of its plans leave a draft" in pdv["why"]
    assert "a draft loop takes 1.00 of a pass" in pdv["why"]
    assert "draft 0.00 ms a token against 10.00" in plain["why"]


@pytest.mark.parametrize(
    ("level", "ratio", "verdict", "mode", "word"),
    [
        ("C=64", 0.8, "faster", "very high concurrency", modes.SEEN),
        ("C=64", 1.0, "no difference", "very high concurrency", modes.NOT_SEEN),
        ("C=8", 1.2, "slower", "overhead valley", modes.SEEN),
        ("C=8", 1.2, "slower", "very high concurrency", modes.OPEN),
        ("C=8", 0.9, "faster", "poor speculation", modes.NOT_SEEN),  # one draft in five stands, and plain is slower
        ("C=8", 0.9, "faster", "under 60 % GPU use", modes.OPEN),  # the device is busy
    ],
)
def test_named_modes_are_judged(level: str, ratio: float, verdict: str, mode: str, word: str) -> None:
    by_name = {each.name: each for each in modes.named_modes(found(level, ratio, verdict))}
    assert by_name[mode].seen == word


@pytest.mark.parametrize(
    ("pair", "balanced", "imbalanced"),
    [
        ("tinyllama-1.1b:tinyllama-1.1b (random)", modes.SEEN, modes.OPEN),
        ("tinyllama-1.1b:llama-2-7b (random)", modes.OPEN, modes.NOT_SEEN),
        ("built-in", modes.OPEN, modes.OPEN),
    ],
)
def test_modes_of_sizes_are_judged_on_such_pairs_alone(pair: str, balanced: str, imbalanced: str) -> None:
    by_name = {each.name: each for each in modes.named_modes(found("C=8", 1.2, "slower", pair))}
    assert by_name["medium concurrency, balanced models"].seen == balanced
    assert by_name["imbalanced sizes"].seen == imbalanced and by_name["overhead valley"].seen == modes.SEEN


def test_low_concurrency_is_judged_over_baseline_where_it_ran() -> None:
    """Whatever the reference is."""
    own = found("n=3", 1.2, "slower")
    own["reference"], own["scenarios"]["s"]["arms"]["baseline"] = "plain", arm(90.0)
    own["scenarios"]["s"]["over_baseline"] = {"pdv": compared(1.3, "slower")}
    [mode] = [each for each in modes.named_modes(own) if each.name == "low concurrency"]
    assert mode.claim.startswith("PDV is slower than baseline") and mode.seen == modes.SEEN and "1.30" in mode.figures


def test_a_report_of_servers_lists_no_modes_that_it_cannot_judge() -> None:
    own = found("C=64", 0.8, "faster")
    assert "not measured" in modes.as_markdown(own)
    own |= {"arms": {name: {"spec": {"url": "http://h:1"}} for name in own["arms"]}}
    assert "not measured" not in modes.as_markdown(own) and "| seen |" in modes.as_markdown(own)
    own["grid"], own["scenarios"]["s"]["arms"] = {}, {"a": {**arm(1.0), "parts": None}}
    own["scenarios"]["s"]["compared"] = {}
    assert "The original's" not in modes.as_markdown(own)


def test_rules_are_held_against_what_was_measured() -> None:
    """A 13.5 GB verifier: `readme` says pdv from 5 on, `slides` pd below 32."""
    many, few = found("C=64", 0.8, "faster"), found("C=8", 1.2, "slower")
    assert advice.rule_verdicts(many)[0] | {"pair": ""} == {
        "pair": "", "level": "C=64", "measured": "faster", "readme": "pdv", "readme verdict": "right", "slides": "pdv",
        "slides verdict": "right",
    }  # fmt: skip
    counts = advice.rule_counts([many, few, found("C=8", 1.0, "no difference")])
    assert counts["readme"] == {"right": 1, "wrong": 1, "no difference": 1}
    assert counts["slides"] == {"right": 2, "no difference": 1}
    once = advice.rule_counts([many, found("C=8", 1.2, "one seed")])
    assert once["readme"] == once["slides"] == {"right": 1, modes.UNJUDGED: 1}
    [(_, ratio, levels)] = advice.gains(many)
    assert 5 < ratio < 7 and levels[0][1]["ratio"] == 1.5
    assert advice.sizes("built-in") is None and POLICIES["pdv batch 32"].settings(4, 4)["batch_size"] == 32


def test_arms_that_do_not_differ_are_lowest_together() -> None:
    """By their own comparison, or by intervals over the reference; a second run of an arm is not one more."""
    own = found("C=64", 0.8, "faster")
    scenario = own["scenarios"]["s"]
    scenario["arms"]["pd again"] = arm(1.0)
    assert advice.lowest(own, scenario) == ["pdv"] and advice.lowest_text(own, scenario) == "pdv"
    scenario["compared"]["pdv"] = compared(0.99, "no difference")
    assert advice.lowest_text(own, scenario) == "pd, pdv"
    scenario["compared"]["plain"] = compared(0.99, "no difference")
    assert advice.lowest_text(own, scenario) == advice.LEVEL


def test_two_arms_that_were_never_compared_differ_where_their_intervals_do() -> None:
    own = found("C=64", 0.8, "faster")
    scenario = own["scenarios"]["s"]
    scenario["arms"]["auto"] = arm(82.0)
    scenario["compared"]["auto"] = {"e2e_ms_mean": {"ratio": 0.82, "low": 0.75, "high": 0.9, "verdict": "faster"}}
    assert advice.lowest(own, scenario) == ["pdv", "auto"], "0.80 lies in 0.75 to 0.90"
    scenario["compared"]["auto"]["e2e_ms_mean"]["low"] = 0.81
    assert advice.lowest(own, scenario) == ["pdv"]
    scenario["compared"]["auto"]["e2e_ms_mean"]["verdict"] = "one seed"
    assert advice.lowest(own, scenario) == ["pdv", "auto"], "one seed tells nothing apart"
    scenario["over_pd"], own["reference"] = scenario["compared"] | {"auto": compared(1.2, "slower")}, "plain"
    scenario["compared"] = {}
    assert advice.lowest(own, scenario) == ["pdv"], "both over pd"


def test_an_arm_that_another_beats_is_not_among_the_lowest() -> None:
    """`auto` is lowest and its interval wide; `plain` is slower than `pd`, which is not told apart from `auto`."""
    own = found("C=64", 1.0, "no difference")
    scenario = own["scenarios"]["s"]
    scenario["arms"]["auto"] = arm(95.0)
    scenario["compared"]["auto"] = {"e2e_ms_mean": {"ratio": 1, "low": 0.5, "high": 2, "verdict": "no difference"}}
    assert advice.lowest(own, scenario) == ["pd", "pdv", "auto"]


def test_the_pdv_that_pipelined_stands_for_it() -> None:
    arms = {"pdv": arm(1.0), "pdv verify 1": arm(1.0, left=4)}
    assert modes.three_lanes({"arms": arms}) == "pdv verify 1"
    arms["pdv verify 1"], arms["pdv"] = arms["pdv"], arms["pdv verify 1"]
    assert modes.three_lanes({"arms": arms}) == "pdv"
    assert modes.three_lanes({"arms": {"pdv": arm(1.0)}}) == "pdv" and modes.three_lanes({"arms": {}}) is None


def test_a_plan_now_and_then_that_leaves_a_draft_is_no_pipeline() -> None:
    """Of 40 plans it takes four."""
    few, enough = (found("C=64", 0.8, "faster") for _ in range(2))
    few["scenarios"]["s"]["arms"]["pdv"], enough["scenarios"]["s"]["arms"]["pdv"] = arm(80.0, left=1), arm(80.0, left=2)
    shares = [modes.left_share(own["scenarios"]["s"]["arms"]["pdv"]) for own in (few, enough)]
    assert shares == [0.025, 0.05] and modes.left_share({"parts": None}) is None
    assert [pipelined(own["scenarios"]["s"], "pdv") for own in (few, enough)] == [False, True]
    assert advice.rule_counts([few])["readme"] == {advice.ALIKE: 1}
    assert results._left(arm(1.0, left=3)["parts"]) == "3 of 40 (7.5 %)"
    assert results._left(arm(1.0)["parts"]) == "0 of 40" and results._left(None) == "–"


def test_parts_add_up() -> None:
    readings = iter([{"draft_s": 1.0, "step_s": 2.0, "waiting": 0.0}, {"draft_s": 1.5, "step_s": 3.0, "waiting": 4.0}])

    class Arm:
        def reading(self) -> dict[str, float]:
            return next(readings)

    meter = Meter(Arm())
    meter.sample()
    meter.sample()
    parts = meter.parts()
    assert parts.totals == {"draft_s": 0.5, "step_s": 1.0} and parts.peaks == {"waiting": 4.0}
    assert parts.means == {"waiting": 2.0} and parts.timeline["draft_s"] == [0.0, 0.5]
    assert Parts.unpacked(parts.packed()) is not None
    both = pooled([parts, parts], 4.0)
    assert both is not None and both["shares"] == pytest.approx(
        {"prefill": 0.0, "draft": 0.25, "verify": 0.0, "host": 0.25, "idle": 0.5}
    )
    assert pooled([], 1.0) is None


def test_claimed_utilisation_stands_beside_what_was_measured() -> None:
    chart = part_charts.overview(found("C=64", 0.8, "faster"))[0]
    assert chart.name == "gpu_utilization" and chart.groups[-1] == part_charts.CLAIM
    claimed = {series.name: series.ys[-1] for series in chart.series if len(series.ys) == 2}
    assert claimed == {"pd": 0.67, "pdv": 0.90}


def test_a_short_run_says_nothing_of_utilisation() -> None:
    """NVML's counter is of up to a second before it is read; in a run of 0.3 s, of the arm before."""

    class Arm:
        def reading(self) -> dict[str, float]:
            return {"verify_s": 1.0, "waiting": 1.0, "gpu_utilization": 0.29, "sm_activity": 0.2}

    meter = Meter(Arm())
    for seconds in (0.3, 1.2):
        meter.rows = [(at, Arm().reading()) for at in (0.0, seconds)]
        parts = meter.parts()
        kept = {"gpu_utilization", "sm_activity"} if seconds > 1 else set()
        assert set(parts.means) == set(parts.peaks) == {"waiting"} | kept
        assert set(parts.timeline) == {"at", "verify_s", "waiting"} | kept and parts.totals == {"verify_s": 0.0}


def test_utilisation_that_is_not_known_is_a_dash() -> None:
    data = found("C=64", 0.8, "faster")
    for name, own in data["scenarios"]["s"]["arms"].items():
        own["parts"]["means"] = {} if name == "pd" else {"gpu_utilization": 0.5}
    chart = part_charts.overview(data)[0]
    by_name = {series.name: series.ys for series in chart.series}
    assert math.isnan(by_name["pd"][0]) and by_name["plain"] == (0.5,) and "too short" in chart.note
    drawn = svg.draw(chart)
    assert drawn.count(">–</text>") == 1 and "nan" not in drawn
    del data["scenarios"]["s"]["arms"]["pd"]
    assert "–:" not in part_charts.overview(data)[0].note


def test_a_folder_without_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no benchmark"):
        modes.write(tmp_path)


def test_pdv_that_never_pipelined_says_nothing_of_three_lanes() -> None:
    alike = found("C=64", 0.8, "faster")
    alike["scenarios"]["s"]["arms"]["pdv"] = arm(80.0, 1.0, left=0)
    by_name = {each.name: each for each in modes.named_modes(alike)}
    assert by_name["very high concurrency"].seen == modes.OPEN
    assert "none of 1 loads" in by_name["very high concurrency"].figures
    assert advice.rule_counts([alike])["readme"] == {advice.ALIKE: 1}


def test_one_seed_is_explained_too() -> None:
    text = modes.as_markdown(found("C=64", 0.8, "one seed"))
    assert "## One seed, beside pd" in text and "50% of its plans leave a draft" in text
    assert "| 0.80 one seed |" in text, "one seed has no interval"


def test_one_seed_judges_no_mode() -> None:
    """Neither seen nor unseen; beside scenarios of more seeds it does not count."""
    one = found("C=64", 0.8, "one seed")
    mode = modes.named_modes(one)[0]
    assert mode.seen == modes.UNJUDGED and mode.figures == "one seed cannot say (mean E2E: s: 0.80 one seed)"
    both = found("C=64", 0.8, "faster")
    both["grid"]["t"], both["scenarios"]["t"] = one["grid"]["s"], one["scenarios"]["s"]
    mode = modes.named_modes(both)[0]
    assert mode.seen == modes.SEEN and "faster in 1 of 1" in mode.figures


def test_cpu_time_is_shown_by_token() -> None:
    own = found("C=64", 0.8, "faster")
    own["scenarios"]["s"]["arms"]["pd"]["parts"]["totals"]["cpu_s"] = 3.0
    [chart] = [each for each in part_charts.overview(own) if each.name == "cpu_time"]
    assert [(each.name, each.ys) for each in chart.series] == [("pd", (30.0,))]
