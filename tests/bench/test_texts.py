"""Half of the prompts invite copying; a seed has its own order."""

from __future__ import annotations

from verifypd.bench.texts import PROSE, drifting, prompts


class Letters:
    """A tokenizer whose ids are characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 300 for letter in text]


def test_half_of_the_prompts_invite_copying() -> None:
    work = prompts(Letters(), 40, seed=3)
    prose = [Letters().encode(text) for text in PROSE]
    assert [ids in prose for ids in work] == [False, True] * 20
    assert work == prompts(Letters(), 40, seed=3) != prompts(Letters(), 40, seed=4)
    stream = drifting(Letters(), 12, seed=3)
    assert [ids in prose for ids in stream] == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3
