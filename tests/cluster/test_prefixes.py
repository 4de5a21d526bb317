"""Who gets a prompt: the replica that has it, unless others have much less to do."""

from __future__ import annotations

from verifypd.cluster.prefixes import BLOCK, PrefixMap, choose, digests

SYSTEM = list(range(4 * BLOCK))


def test_prompts_share_the_names_of_what_they_share() -> None:
    one, other = digests([*SYSTEM, 1, 2]), digests([*SYSTEM, 3, *range(BLOCK)])
    assert len(one) == 4 and len(other) == 5
    assert one == other[:4]
    assert digests(SYSTEM)[-1] == one[2], "the last token is computed in any case: its block is not looked for"
    assert digests([1, *SYSTEM])[0] != one[0] and digests([5]) == []


def test_the_longest_beginning_decides() -> None:
    known: PrefixMap[str] = PrefixMap()
    long = digests([*SYSTEM, *SYSTEM, 1])
    known.sent(long, "b")
    known.sent(long[:2], "a")
    alive = {"a": 0, "b": 0}
    assert known.home(long, alive) == "b"
    assert known.home(long[:2], alive) == "a"
    assert known.home(long, {"a": 0}) == "a", "b is gone; a has the beginning of it"
    assert known.home(digests([7] * 40), alive) is None


def test_what_was_used_long_ago_is_forgotten_longest_first() -> None:
    known: PrefixMap[str] = PrefixMap(most=5)
    known.sent(digests([*SYSTEM, 1]), "a")
    known.sent(digests([9] * (3 * BLOCK + 1)), "b")
    assert known.held == {"a": 2, "b": 3}
    assert known.home(digests([*SYSTEM, 1]), {"a": 0}) == "a", "by its first two blocks"


def test_home_comes_first_unless_it_has_too_much_to_do() -> None:
    assert choose("b", {"a": 0, "b": 4, "c": 1}, {}, slack=4) == ["b", "a", "c"]
    assert choose("b", {"a": 0, "b": 5, "c": 1}, {}, slack=4) == ["a", "c", "b"]
    assert choose(None, {"a": 2, "b": 1}, {}, slack=4) == ["b", "a"]
    assert choose("gone", {"a": 2, "b": 1}, {}, slack=4) == ["b", "a"]
    assert choose(None, {}, {}, slack=4) == []


def test_new_prompts_spread_over_replicas_with_as_little_to_do() -> None:
    known: PrefixMap[str] = PrefixMap()
    for number in range(10):
        prompt = digests([number] * (2 * BLOCK + 1))
        known.sent(prompt, choose(known.home(prompt, {"a": 0, "b": 0}), {"a": 0, "b": 0}, known.held, 4)[0])
    assert known.held == {"a": 10, "b": 10}
