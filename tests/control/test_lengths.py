"""Draft lengths against brute force: the lengths that are chosen bring tokens at the least seconds there are."""

from __future__ import annotations

import random

import pytest

from verifypd.control.cost import NOTHING, Coefficients, CostModel, Work
from verifypd.control.lengths import Drafting, Load, Option, best_two, options

FREE = {"draft_step": 0.0, "draft_context": 0.0, "draft_row": 0.0}


def curve(alpha: float, depth: int) -> list[float]:
    return [alpha ** (i + 1) for i in range(depth)]


def everyone(count: int, alpha: float, depth: int = 8, context: int = 512, **changes: object) -> list[Drafting]:
    return [Drafting(slot, curve(alpha, depth), context, 2.0, **changes) for slot in range(count)]  # type: ignore[arg-type]


def load(count: int, context: int = 512, riding: Work = NOTHING) -> Load:
    return Load(count, Work(count, count * context), riding)


def chosen(drafting: list[Drafting], before: Load, cost: CostModel) -> Option:
    return best_two(options(drafting, before, cost))[0]


def price(drafting: list[Drafting], lengths: dict[int, int], before: Load, cost: CostModel) -> float:
    """Seconds a token of these lengths, from the definition: what decoding adds to the step, over the tokens."""
    models = [each for each in drafting if lengths.get(each.slot) and not each.looked_up]
    draft = 0.0
    if models:
        longest = max(lengths[each.slot] for each in models)
        draft = cost.draft_seconds(longest, sum(e.lag for e in models), sum(e.context for e in models))
    rows = Work(rows=sum(lengths.values()))
    verify = cost.pass_seconds(before.decode + before.riding + rows) - cost.pass_seconds(before.riding)
    tokens = before.requests + sum(sum(each.curve[: lengths.get(each.slot, 0)]) for each in drafting)
    return (draft + verify + (0.0 if before.riding.rows else cost.overhead)) / tokens


def best_uniform(drafting: list[Drafting], before: Load, cost: CostModel) -> float:
    """The least seconds a token over all lengths that are one for all, as far as each may draft."""
    found = []
    for length in range(9):
        lengths = {each.slot: min(length, len(each.curve)) for each in drafting}
        found.append(price(drafting, {slot: n for slot, n in lengths.items() if n}, before, cost))
    return min(found)


def some_costs(rng: random.Random) -> CostModel:
    cost = CostModel(
        Coefficients(
            base=rng.choice((1e-3, 4.6e-3, 20e-3)),
            row=rng.choice((0.0, 5e-6, 100e-6)),
            steep=rng.choice((21e-6, 300e-6)),
            knee=rng.choice((1.0, 64.0, 215.0)),
            mixed=rng.choice((0.0, 1e-3)),
            draft_start=rng.choice((0.0, 0.5e-3)),
            draft_step=rng.choice((0.05e-3, 0.31e-3, 1.2e-3, 5e-3)),
        )
    )
    cost.overhead = rng.choice((0.0, 2e-3))
    return cost


def some_requests(rng: random.Random) -> tuple[list[Drafting], Load]:
    """Requests that are alike or not, alone or beside a chunk or beside some that may not draft."""
    count, plain = rng.choice((1, 2, 8, 32, 128)), rng.choice((0, 5))
    alpha, spread = rng.uniform(0.05, 0.95), rng.choice((0.0, 0.15))
    drafting = []
    for slot in range(count):
        own = min(0.98, max(0.02, rng.gauss(alpha, spread)))
        drafting.append(Drafting(slot, curve(own, rng.randint(1, 8)), rng.randint(50, 4000), rng.choice((1.0, 2.0))))
    chunk = rng.choice((0, 0, 100, 1000))
    context = sum(each.context for each in drafting)
    return drafting, Load(count + plain, Work(count + plain, context), Work(chunk, chunk, chunk, chunk * chunk))


def test_the_choice_is_within_a_percent_of_the_best_uniform_length() -> None:
    rng = random.Random(7)
    for _ in range(400):
        drafting, before = some_requests(rng)
        cost = some_costs(rng)
        option = chosen(drafting, before, cost)
        assert option.per_token == pytest.approx(price(drafting, option.lengths, before, cost))
        assert option.per_token <= 1.01 * best_uniform(drafting, before, cost)


def test_who_accepts_less_drafts_less() -> None:
    drafting = [*everyone(64, 0.9), *(Drafting(64 + i, curve(0.15, 8), 512, 2.0) for i in range(64))]
    lengths = chosen(drafting, load(128), CostModel(Coefficients())).lengths
    good = sum(lengths.get(slot, 0) for slot in range(64)) / 64
    bad = sum(lengths.get(slot, 0) for slot in range(64, 128)) / 64
    assert good >= 2 and bad < 1


def test_nothing_is_drafted_where_no_draft_pays() -> None:
    cost = CostModel(Coefficients())
    option = chosen(everyone(16, 0.1), load(16), cost)
    assert (option.longest, option.lengths) == (0, {})
    assert option.tokens == 16
    assert options([], load(4), cost) == [chosen([], load(4), cost)]


def test_a_better_drafter_drafts_longer() -> None:
    longest = [
        chosen(everyone(8, alpha), load(8), CostModel(Coefficients())).longest for alpha in (0.1, 0.5, 0.8, 0.95)
    ]
    assert longest == sorted(longest) and longest[0] < longest[-1]


def test_beside_prompts_what_a_step_takes_anyway_decides_nothing() -> None:
    """Host work of a step is paid by the prompts; alone it is spread over the tokens that drafts bring."""
    costs, slow = Coefficients(draft_step=0.9e-3), CostModel(Coefficients(draft_step=0.9e-3))
    slow.overhead = 20e-3
    beside = load(4, riding=Work(512, 512, 512, 512 * 512))
    assert chosen(everyone(4, 0.8), beside, slow) == chosen(everyone(4, 0.8), beside, CostModel(costs))
    assert chosen(everyone(4, 0.8), load(4), slow).longest > chosen(everyone(4, 0.8), load(4), CostModel(costs)).longest


# -- look-ups ----------------------------------------------------------------------------------------------------------


def test_look_ups_take_no_loop() -> None:
    """They pay for rows and not for steps: a drafter however dear changes nothing of them."""
    dear = CostModel(Coefficients(draft_step=1.0, draft_start=1.0))
    option = chosen(everyone(4, 0.7, looked_up=True), load(4), dear)
    assert set(option.lengths) == {0, 1, 2, 3} and min(option.lengths.values()) == 8
    assert option.longest == 0
    assert option.seconds == pytest.approx(dear.pass_seconds(Work(4 + 32, 4 * 512)))


def test_a_look_up_beside_a_model_is_as_long_as_pays_for_its_rows() -> None:
    """A long copy does not lengthen the loop of the others, nor is it cut to their length."""
    cost = CostModel(Coefficients(base=4e-3, steep=0.0, row=0.05e-3, draft_step=1.2e-3))
    drafting = [Drafting(0, curve(0.97, 8), 512, 0.0, True), Drafting(1, curve(0.5, 8), 512, 2.0)]
    option = chosen(drafting, load(2), cost)
    assert option.lengths[0] == 8 and option.lengths.get(1, 0) == option.longest <= 2
    loop = cost.draft_seconds(option.longest, 2.0, 512) if option.longest else 0.0
    rows = 2 + sum(option.lengths.values())
    assert option.seconds == pytest.approx(loop + cost.pass_seconds(Work(rows, 2 * 512)))


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_below_the_knee_ride_free() -> None:
    """With a free drafter everything that has a chance is drafted; what has next to none is not worth any row."""
    cost = CostModel(Coefficients(**FREE))
    assert chosen(everyone(8, 0.9), load(8), cost).lengths == dict.fromkeys(range(8), 8)
    hopeless = chosen(everyone(8, 0.001), load(8), CostModel(Coefficients(**FREE, row=1e-6)))
    assert hopeless.lengths == {}


def test_beyond_the_knee_rows_must_be_earned() -> None:
    """At 128 requests below a knee of 215 some 87 rows are free; each beyond takes the price of a fifth of a token."""
    cost = CostModel(Coefficients(**FREE))
    few, many = chosen(everyone(8, 0.6), load(8), cost), chosen(everyone(128, 0.6), load(128), cost)
    assert few.longest == 8 or max(few.lengths.values()) >= 7
    assert max(many.lengths.values()) < max(few.lengths.values())


def test_drafts_that_reach_beyond_the_knee_still_fill_the_free_rows_before_it() -> None:
    """32 requests and a knee at 64: one token each is free, a second would be dear."""
    cost = CostModel(Coefficients(steep=1e-3, knee=64.0, draft_step=0.05e-3))
    option = chosen(everyone(32, 0.6), load(32), cost)
    assert option.lengths == dict.fromkeys(range(32), 1)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_beside_a_chunk_decoding_pays_only_what_it_adds(alpha: float) -> None:
    """The chunk reads the weights anyway: the base is not charged to tokens, rows beyond the knee are."""
    cost = CostModel(Coefficients())
    riding = Work(2048, 2048, 2048, 2048 * 2048)
    everybody = everyone(16, alpha)
    plain, *drafts = options(everybody, load(16, riding=riding), cost)
    slope, context = cost.slope(2048, chunks=True), 16 * 512 * cost.coefficients.context
    assert plain.seconds == pytest.approx(16 * slope + context)
    for option in drafts:
        rows, some = 16 + sum(option.lengths.values()), [each for each in everybody if each.slot in option.lengths]
        loop = cost.draft_seconds(option.longest, sum(each.lag for each in some), sum(each.context for each in some))
        assert option.seconds == pytest.approx(rows * slope + context + loop)


def test_beside_a_small_chunk_drafts_do_not_vanish() -> None:
    """A chunk that leaves the pass below the knee changes nothing of what is drafted."""
    cost = CostModel(Coefficients(draft_step=0.31e-3, mixed=0.0))
    alone = chosen(everyone(8, 0.8, 4), load(8), cost)
    beside = chosen(everyone(8, 0.8, 4), load(8, riding=Work(64, 64, 64, 64 * 64)), cost)
    assert alone.longest > 0 and beside.longest > 0


@pytest.mark.parametrize("chunk", [64, 512])
def test_where_a_token_may_take_more_the_draft_brings_most_for_that(chunk: int) -> None:
    """Against every length that is one for all: none brings more, at what a token may take."""
    cost, drafting = CostModel(Coefficients(draft_step=1.2e-3, mixed=1e-3)), everyone(12, 0.8)
    before = load(12, riding=Work(chunk, chunk, chunk, chunk * chunk))
    longest = []
    for worth in (0.0, 0.2e-3, 0.3e-3, 0.5e-3, 1e-2):
        option, _ = best_two(options(drafting, before, cost, worth), worth)
        least = max(worth, option.per_token) * (1.0 + 1e-9)
        for length in range(9):
            tokens = sum(1.0 + sum(each.curve[:length]) for each in drafting)
            seconds = tokens * price(drafting, dict.fromkeys(range(12), length) if length else {}, before, cost)
            assert option.seconds - least * option.tokens <= seconds - least * tokens + 1e-9
        longest.append(option.longest)
    assert longest == sorted(longest) and longest[0] < longest[-1] == 8


# -- the runner-up -----------------------------------------------------------------------------------------------------


def test_the_runner_up_is_the_next_best() -> None:
    found = options(everyone(8, 0.8), load(8), CostModel(Coefficients()))
    best, second = best_two(found)
    assert best == min(found, key=lambda option: option.per_token) != found[0]
    others = [option for option in found if option is not best]
    assert second == min(others, key=lambda option: option.seconds - best.per_token * option.tokens)
    [only] = options([], load(3), CostModel(Coefficients()))
    assert best_two([only]) == (only, only)
