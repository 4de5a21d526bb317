"""What the original published is judged by results: planted figures give the words they must."""

from __future__ import annotations

from typing import Any

import pytest

from verifypd.bench import advice, claims
from verifypd.bench.modes import NOT_SEEN, OPEN, SEEN, UNJUDGED

PAIR = "tinyllama-1.1b:llama-2-7b (random)"


def arm(p95: float = 1.0, busy: float | None = None, peak: float = 0.0, left: int = 0, rate: float = 1.0) -> Any:
    """An arm; left: plans that left a draft for a later verify."""
    totals = {"draft_s": 1.0, "verify_s": 1.0, "draft_loops_n": 1.0, "passes_n": 1.0, "plans_n": 10.0,
              "plans_left_n": float(left), "continued_n": 1.0, "verdicts_n": 1.0}  # fmt: skip
    shares = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "host": 0.0}
    parts = {"totals": totals, "shares": shares, "means": {} if busy is None else {"gpu_utilization": busy},
             "peaks": {"memory": peak}}  # fmt: skip
    figures = {"e2e_ms_p95": p95, "tok_s": rate, "e2e_ms_mean": p95, "ttft_ms_mean": 0.0, "output_tokens": 10,
               "seconds": 1.0}  # fmt: skip
    by_seed = {seed: {"e2e_ms_mean": p95 * spread} for seed, spread in (("0", 0.99), ("1", 1.0), ("2", 1.01))}
    return {"figures": figures, "parts": parts, "drafts": {"acceptance_rate": 0.41}, "seeds": [1], "by_seed": by_seed}


def found(levels: dict[str, dict[str, Any]], letter: str = "B", **more: Any) -> dict[str, Any]:
    """A result of some loads."""
    own = {f"{letter} {level}": {"arms": arms, "compared": {}, "over_pd": {}} for level, arms in levels.items()}
    grid = {f"{letter} {level}": [PAIR, level] for level in levels}
    return {"scenarios": own, "grid": grid, "protocol": {"letter": letter}, "reference": "plain", "arms": {}} | more


def said(ratio: float, verdict: str) -> dict[str, Any]:
    return {"ratio": ratio, "low": ratio, "high": ratio, "verdict": verdict}


@pytest.mark.parametrize(
    ("shares", "word"), [((0.5, 0.67, 0.9), SEEN), ((0.45, 0.7, 0.95), SEEN), ((0.99, 0.99, 0.99), NOT_SEEN)]
)
def test_utilisation_is_the_median_of_the_loads(shares: tuple[float, ...], word: str) -> None:
    arms = {name: arm(busy=share, left=5) for name, share in zip(claims.SYSTEMS.values(), shares, strict=True)}
    mode = claims.utilisation([("B", found({"n=1": arms, "n=5": arms}))])
    assert mode.seen == word and mode.figures.startswith(f"B: {100 * shares[0]:.0f} / ")
    assert "50 / 67 / 90 %" in mode.claim


def test_utilisation_leaves_out_loads_in_which_pdv_planned_as_pd() -> None:
    """The others' loads too: all three are of the same ones."""
    one = {name: arm(busy=share, left=5) for name, share in zip(claims.SYSTEMS.values(), (0.5, 0.67, 0.9), strict=True)}
    two = {name: arm(busy=0.1) for name in one}
    mode = claims.utilisation([("D", found({"C=5": one, "C=3": two, "C=10": two}))])
    assert mode.seen == SEEN
    assert mode.figures == "D: 50 / 67 / 90 %; not counted: 2 in which PDV hardly pipelined"
    mode = claims.utilisation([("D", found({"C=3": two}))])
    assert mode.seen == OPEN and "PDV pipelined in none of 1 loads" in mode.figures
    for short in one.values():
        short["figures"]["seconds"] = 0.3  # of the counter's time before it was read, most was of another run
    assert claims.utilisation([("D", found({"C=5": one}))]).seen == OPEN


def test_what_no_result_has_is_not_measured() -> None:
    nothing = [("B", found({"n=1": {"pd": arm()}}))]
    assert claims.utilisation(nothing).seen == claims.memory(nothing).seen == OPEN


@pytest.mark.parametrize(("peaks", "word", "text"), [
    ((1.03, 1.04, 1.0), SEEN, "0 to +4 %; so much in 2 of 3"),
    ((1.0, 1.25, 0.999), NOT_SEEN, "0 to +25 %; so much in 0 of 3"),
])  # fmt: skip
def test_memory_is_held_against_pd(peaks: tuple[float, ...], word: str, text: str) -> None:
    levels = {
        f"n={i}": {"pd": arm(peak=1e9), "pdv pipelined": arm(peak=1e9 * peak, left=5)} for i, peak in enumerate(peaks)
    }
    mode = claims.memory([("B", found(levels))])
    assert mode.seen == word and text in mode.figures


def test_memory_leaves_out_loads_in_which_pdv_planned_as_pd() -> None:
    alike = {"pd": arm(peak=1e9), "pdv": arm(peak=1.03e9)}
    mode = claims.memory([("A", found({"C=8": alike}, "A"))])
    assert mode.seen == OPEN and "PDV pipelined in none of 1 loads" in mode.figures
    both = found({"C=8": alike, "C=64": alike | {"pdv verify 1": arm(peak=1.2e9, left=5)}}, "A")
    mode = claims.memory([("A", both)])
    assert mode.seen == NOT_SEEN and "A: +20 %; so much in 0 of 1 loads; not counted: 1 in" in mode.figures


def test_tails_need_most_comparisons() -> None:
    own = found({"8/s": {"pdv": arm(left=5)}}, "E")
    [scenario] = own["scenarios"].values()
    scenario["compared"] = {"pdv": {"tpot_ms_p95": said(0.8, "faster"), "gap_ms_p99": said(0.7, "faster")}}
    assert claims.decode_tails(own).seen == SEEN
    scenario["compared"]["pdv"]["gap_ms_p99"] = said(1.6, "slower")
    mode = claims.decode_tails(own)
    assert mode.seen == NOT_SEEN and "gap p99 1.60 (slower)" in mode.figures
    scenario["compared"]["pdv"] = dict.fromkeys(("tpot_ms_p95", "gap_ms_p99"), said(0.7, "one seed"))
    assert claims.decode_tails(own).seen == UNJUDGED


def test_tails_of_a_pdv_that_planned_as_pd_say_nothing() -> None:
    """Of several PDVs the one that pipelined is judged; without one, none."""
    own = found({"8/s": {"pdv": arm()}, "16/s": {"pdv": arm(), "pdv verify 4": arm(left=5)}}, "E", note="SIMULATED")
    faster, slower = (
        dict.fromkeys(("tpot_ms_p95", "gap_ms_p99"), said(ratio, word))
        for ratio, word in ((0.7, "faster"), (1.6, "slower"))
    )
    for scenario in own["scenarios"].values():
        scenario["compared"] = {"pdv": faster, "pdv verify 4": slower}
    mode = claims.decode_tails(own)
    assert mode.seen == NOT_SEEN and "8/s: TPOT" not in mode.figures.replace("16/s", "")
    assert mode.figures.startswith("simulated, over plain: E 16/s: TPOT p95 1.60 (slower)")
    assert mode.figures.endswith("not counted: 1 in which PDV hardly pipelined")
    own["scenarios"].pop("E 16/s")
    mode = claims.decode_tails(own)
    assert mode.seen == OPEN and mode.figures == "PDV pipelined in none of 1 loads"


def test_polling_is_held_against_being_notified() -> None:
    def ring(polled: float) -> dict[str, Any]:
        return {"ring": [{"wait": "poll", "work_ms": 1.0, "hand_over_us": polled},
                         {"wait": "condition", "work_ms": 1.0, "hand_over_us": 20.0}]}  # fmt: skip

    assert claims.waiting(ring(10.0)).seen == SEEN and claims.waiting(ring(75.0)).seen == NOT_SEEN


@pytest.mark.parametrize(
    ("verdict", "word"),
    [("slower", "no other depth is faster"), ("faster", NOT_SEEN), ("one seed", UNJUDGED)],
)
def test_a_depth_is_best_where_no_other_is_faster(verdict: str, word: str) -> None:
    arms = {"pdv queue 1.2": arm(), "pdv queue 2": arm()}
    own = found({"n=20": arms}, reference="pdv queue 1.2", arms=dict.fromkeys(arms))
    own["scenarios"]["B n=20"]["compared"] = {"pdv queue 2": {"e2e_ms_mean": said(1.1, verdict)}}
    mode = claims.queue_depth(own)
    shown = "1.10" if word == UNJUDGED else f"1.10 ({verdict})"
    assert mode.seen == word and mode.figures.endswith(f"2: {shown}") and mode.claim.startswith("1.2 ×")


def test_batches_should_follow_the_load_where_a_smaller_one_is_faster() -> None:
    arms = {"pdv batch 64": arm(2.0), "pdv batch 8": arm(1.0)}
    own = found({"8/s": arms}, "E", reference="pdv batch 64", arms=dict.fromkeys(arms))
    own["scenarios"]["E 8/s"]["compared"] = {"pdv batch 8": {"e2e_ms_mean": said(0.9, "faster")}}
    assert (
        claims.batch_sizes(own).seen == SEEN and "faster than the largest in 1 of 1" in claims.batch_sizes(own).figures
    )
    own["scenarios"]["E 8/s"]["compared"] = {"pdv batch 8": {"e2e_ms_mean": said(0.9, "one seed")}}
    assert claims.batch_sizes(own).seen == UNJUDGED


def batched(arms: dict[str, Any], verdict: str = "no difference") -> dict[str, Any]:
    """A load of arms with batches; verdict: on those that were compared with the reference, a batch of 64."""
    own = found({"8/s": arms}, "E", reference="pdv batch 64", arms=dict.fromkeys(arms))
    each = {"e2e_ms_mean": said(1.0, verdict)}
    own["scenarios"]["E 8/s"]["compared"] = {name: each for name in arms if name != "pdv batch 64"}
    return own


def test_a_batch_that_pipelined_is_not_compared_with_one_that_did_not() -> None:
    arms = {"pdv batch 64": arm(10.0), "pdv batch 8": arm(1.0, left=5), "pdv batch 32": arm(10.0)}
    mode = claims.batch_sizes(batched(arms))
    assert mode.seen == NOT_SEEN and mode.figures.endswith("in 0 of 1 comparisons")
    [load] = advice.batch_loads(batched(arms, "faster"))
    assert [(kind.pipelined, [each.size for each in kind.limits]) for kind in load.kinds] == [
        (False, ["64", "32"]),
        (True, ["8"]),
    ]
    assert load.verdicts == ["faster"] and claims.batches(load).seen == SEEN, "32 over 64, as it was compared"
    arms.pop("pdv batch 32")
    [load] = advice.batch_loads(batched(arms, "faster"))
    assert claims.batch_sizes(batched(arms)).seen == claims.batches(load).seen == OPEN


@pytest.mark.parametrize(("smaller", "verdict", "word"), [
    (30.0, "slower", NOT_SEEN), (10.01, "no difference", NOT_SEEN), (5.0, "faster", SEEN),
])  # fmt: skip
def test_batches_that_pipelined_are_compared_with_each_other(smaller: float, verdict: str, word: str) -> None:
    """By seeds: when they ran they were compared with the reference, which did not pipeline."""
    arms = {"pdv batch 64": arm(1.0), "pdv batch 8": arm(smaller, left=5), "pdv batch 32": arm(10.0, left=5)}
    [load] = advice.batch_loads(batched(arms, "slower"))
    mode = claims.batches(load)
    assert mode.seen == claims.batch_sizes(batched(arms)).seen == word
    assert mode.figures == f"64: 1 ms°; 32: 10 ms, 8: {smaller:.0f} ms ({verdict})" and mode.claim.endswith("at 8/s")


def test_batches_of_one_seed_are_not_judged() -> None:
    arms = {"pdv batch 32": arm(9.0, left=5), "pdv batch 8": arm(1.0, left=5)}
    for each in arms.values():
        each["by_seed"] = {"0": each["by_seed"]["0"]}
    [load] = advice.batch_loads(batched(arms))
    assert load.verdicts == ["one seed"] and claims.batches(load).seen == UNJUDGED


def test_as_much_as_an_arm_differs_from_itself_batches_may_differ_by_chance() -> None:
    arms = {"pdv batch 32": arm(10.0, left=5), "pdv batch 8": arm(12.0, left=5)}
    own = batched(arms)
    assert advice.batch_loads(own)[0].verdicts == ["slower"]
    own["scenarios"]["E 8/s"]["itself"] = {"e2e_ms_mean": said(0.8, "faster")}
    assert advice.batch_loads(own)[0].verdicts == ["no difference"]


def drafted(gains: dict[str, tuple[float, ...]], verdict: str = "slower") -> dict[str, Any]:
    """A sweep: by verifier of TinyLlama's drafts, plain over PD at some loads, give or take a tenth."""
    own = found({}, "A", reference="pd")
    for name, ratios in gains.items():
        for level, ratio in enumerate(ratios, 1):
            scenario = f"A C={level}, {name}"
            own["grid"][scenario] = [f"tinyllama-1.1b:{name} (simulated)", f"C={level}"]
            each = said(ratio, verdict) | {"low": 0.9 * ratio, "high": 1.1 * ratio}
            own["scenarios"][scenario] = {"arms": {}, "compared": {"plain": {"e2e_ms_mean": each}}, "over_pd": {}}
    return own


@pytest.mark.parametrize(("large", "word", "text"), [
    ((2.0, 2.0, 2.0), NOT_SEEN, "in 0 of 3 loads, elsewhere in 3"),
    ((1.0, 1.0, 1.45), SEEN, "in 2 of 3 loads, elsewhere in 0"),  # the third is within chance
    ((1.4, 1.4, 1.4), NOT_SEEN, "in 0 of 3 loads, elsewhere in 0"),
])  # fmt: skip
def test_a_size_ratio_is_best_where_drafting_gains_most(large: tuple[float, ...], word: str, text: str) -> None:
    """Not where it gains: a verifier of 6 times its draft is judged beside others of 1 and of 31 times."""
    gains = {"llama-2-7b": (1.5, 1.5, 1.5), "codellama-34b": large, "tinyllama-1.1b": (1.0, 1.0, 1.0)}
    mode = claims.best_ratio(drafted(gains))
    assert mode.seen == word and mode.figures.endswith(text) and mode.claim.startswith("best at 3–7 ×")
    assert f"1.50–1.50 at 6 ×, {min(large):.2f}–{max(large):.2f} at 31 ×, 1.00–1.00 at 1 ×" in mode.figures


def test_a_size_ratio_is_not_judged_by_one_seed_nor_without_another_beside_it() -> None:
    both = {"llama-2-7b": (1.5,), "codellama-34b": (2.0,)}
    assert claims.best_ratio(drafted(both, "one seed")).seen == UNJUDGED
    for name in both:
        assert claims.best_ratio(drafted({name: both[name]})).seen == OPEN


@pytest.mark.parametrize("left", [0, 5])
def test_a_sweep_in_which_pdv_never_pipelined_says_nothing(left: int) -> None:
    four = {"C=16": {"pd": arm(rate=9.0), "pdv": arm(rate=5.0, left=left)}, "C=64": {"pdv": arm(rate=8.0, left=left)},
            "C=96": {"pdv": arm(rate=99.0)}}  # fmt: skip
    own = found(four, "A", reference="pd")
    own["scenarios"]["A C=16"]["compared"] = {"pdv": {"e2e_ms_mean": said(0.8, "faster")}}
    peak, mean = claims.sweep(own)
    assert peak.seen == (SEEN if left else OPEN) and "+73 % / +52 % / +66 %" in mean.claim
    assert mean.seen == (SEEN if left else OPEN)
    assert claims.won([own]).seen == (SEEN if left else OPEN)
    own["scenarios"]["A C=16"]["compared"] = {"pdv": {"e2e_ms_mean": said(0.8, "one seed")}}
    assert [each.seen for each in (claims.sweep(own)[1], claims.won([own]))] == [UNJUDGED if left else OPEN] * 2


def test_published_figures_stand_beside_ours() -> None:
    """B, n = 20: published P95 is 113.6, 123.2 and 95.7 s; tokens/s of PDV 1.58 of Baseline's."""
    arms = {"baseline": arm(100.0), "pd": arm(40.0, rate=3.0), "pdv pipelined": arm(50.0, left=5)}
    [change] = claims.published_changes(found({"n=20": arms, "n=7": arms}))
    assert claims.change_texts(change.published["e2e_ms_p95"], ("PD", "PDV")) == "+8 % / −16 %"
    assert claims.change_texts(change.published["tok_s"], ("PD", "PDV")) == "– / +58 %"
    assert claims.change_texts(change.measured["tok_s"], ("pd", "pdv pipelined")) == "+200 % / +0 %"
    assert (change.over_baseline, change.over_pd) == (claims.YES, claims.NO)
    arms["pdv pipelined"] = arm(50.0, left=0)
    [change] = claims.published_changes(found({"n=20": arms}))
    assert change.over_pd == change.over_baseline == claims.UNTOLD, "it planned as PD does"
