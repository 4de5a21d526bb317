"""Who drafts next: expected gain from confirmed tokens and counts."""

from __future__ import annotations

import itertools
import random

import pytest

from verifypd.drafters.choice import Choice, Copying, gain
from verifypd.request import Request, SamplingParams


def request(tokens: list[int], prompt: int | None = None, order: int = 0) -> Request:
    made = Request(str(order), tokens[:prompt], SamplingParams(), seed=0, max_length=10_000, order=order)
    made.tokens = list(tokens)
    return made


def test_gain_is_tokens_per_pass() -> None:
    assert gain(0.0, 8, 0.13) == (1.0, 0)
    value, length = gain(1.0, 4, 0.03)
    assert length == 4 and value == pytest.approx(5 / 1.12)
    assert gain(0.7, 8, 0.13)[1] < gain(0.7, 8, 0.03)[1]  # dearer steps, shorter drafts


def test_a_repeating_text_is_copied_and_a_new_one_is_drafted() -> None:
    period = [5, 9, 200, 31, 7, 14, 3]
    choice = Choice("ngram", "head", 2, 4)
    copying = request(period * 2, len(period))
    for _ in range(40):
        name, *_ = choice.decide(copying, 8)
        copying.tokens.append(period[len(copying.tokens) % len(period)])
    assert (name, choice.decide(copying, 8)[:2]) == ("ngram", ("ngram", 8))
    fresh = request(random.Random(0).sample(range(10_000), 60), 20, order=1)
    assert choice.decide(fresh, 8)[:2] == ("head", 8)


def test_what_steps_cost_decides_between_two_that_are_about_as_good() -> None:
    choice = Choice("ngram", "head", 2, 4)
    text = request([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2], 12)  # one long match: predicted with 0.75
    choice.decide(text, 8)
    for _ in range(6):
        choice.observe(0, "head", 4, 4)  # the head is almost always right
    choice.row, choice.step = 0.03, 0.02
    assert choice.decide(text, 8)[0] == "head", "all but free, and better"
    choice.row, choice.step = 0.03, 0.4
    assert choice.decide(text, 8)[0] == "ngram", "better, but too dear"


def test_look_ups_that_fail_give_way_and_good_drafts_hold_their_own() -> None:
    """The pair (1, 2) occurs again and again and is followed by something else each time."""
    choice = Choice("ngram", "head", 2, 4)
    text = request([1, 2, 50], 3)
    picks = []
    for i in range(12):
        text.tokens += [1, 2]
        picks.append(choice.decide(text, 4)[0])
        choice.observe(0, "head", 4, 3)
        text.tokens.append(100 + i)
    assert picks[-1] == "head"
    alone = Copying(2, 4)
    alone.extend(text.tokens, 3)
    alone.extend([*text.tokens, 1, 2], 3)
    assert alone.chance is not None and alone.chance < 0.15


def test_prompts_are_no_evidence() -> None:
    copying = Copying(2, 4)
    copying.extend([1, 2, 3, 4] * 10, prompt_len=40)
    assert copying.chance == pytest.approx(0.75)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 40])
def test_a_prompt_read_at_once_is_one_read_token_by_token(prompt: int) -> None:
    noise = random.Random(prompt)
    tokens = [noise.randrange(3) for _ in range(60)]
    whole, slow = Copying(2, 4), Copying(2, 4)
    for end in range(1, len(tokens) + 1):
        slow.extend(tokens[:end], prompt)
        if end < prompt:
            continue
        whole.extend(tokens[:end], prompt)
        assert (whole._follows, whole._match, whole.chance) == (slow._follows, slow._match, slow.chance)


def test_a_request_that_leaves_is_forgotten() -> None:
    choice = Choice("ngram", "head", 2, 4)
    choice.decide(request([1, 2, 3]), 4)
    choice.forget(0)
    choice.observe(0, "head", 4, 4)
    assert not choice._requests


def test_it_says_how_look_ups_would_have_fared_so_far() -> None:
    """Counted over output tokens alone, each once; a text that never repeats says nothing."""
    period = [5, 9, 200, 31, 7, 14, 3]
    choice = Choice("ngram", "head", 2, 4)
    copying = request(period * 2, len(period))
    stood, trials = choice.decide(copying, 8).lookups
    assert stood == trials > 0
    assert choice.decide(copying, 8).lookups == (stood, trials), "nothing new was confirmed"
    copying.tokens += [5, 9, 77]
    assert choice.decide(copying, 8).lookups == (stood + 2, trials + 3)
    assert Choice("ngram", "head", 2, 4).decide(request(list(range(40, 70)), 4), 8).lookups == (0, 0)


def test_look_ups_that_nobody_would_make_are_not_heard_of() -> None:
    """After a pair the text mostly goes on in a new way, after four tokens as it did: only of those is it told."""
    choice, fresh = Choice("ngram", "head", 2, 4), itertools.count(1000)
    text, block = request([1, 2], 2), list(range(10, 24))
    before = (0, 0)
    for turn in range(60):
        for _ in range(6):
            text.tokens += [next(fresh), 1, 2]
        text.tokens += [next(fresh), *block]
        pick = choice.decide(text, 8)
        if turn == 20:
            before = pick.lookups
    stood, trials = pick.lookups[0] - before[0], pick.lookups[1] - before[1]
    assert trials == 39 * 11, "eleven of a block's tokens follow four that came before, and so does one that is new"
    assert stood == 39 * 10


def test_reading_a_pick_changes_nothing() -> None:
    """It is what was decided last, whatever was confirmed since."""
    choice, text = Choice("ngram", "head", 2, 4), request([5, 9, 200, 31] * 3, 4)
    assert choice.pick(0) == ("head", 0, (0, 0)) and not choice._requests
    decided = choice.decide(text, 8)
    text.tokens += [5, 9, 77]
    assert choice.pick(0) == choice.pick(0) == decided
    assert choice.decide(text, 8).lookups == (decided.lookups[0] + 2, decided.lookups[1] + 3)
