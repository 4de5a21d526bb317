"""Lines of drafted tokens: what a confirmed token leaves of them, and who gets none where memory is short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.arms import make
from tests.engine.conftest import pair  # noqa: F401
from verifypd.drafters.ahead import LEVEL, AheadDrafter, Text, Want, params_of
from verifypd.drafters.model import ModelDrafter
from verifypd.kv.blocks import BlockPool
from verifypd.request import SamplingParams

FACTS: dict[str, Any] = {
    "params": {"temperature": 0.0}, "seed": 1, "choice": 0, "prompt_len": 4, "max_len": 100, "bad_words_ids": [],
    "acceptance": "rejection",
}  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "line", "cached"),
    [
        ((), [7, 8, 9], 5),  # nothing was confirmed
        ((7,), [8, 9], 5),  # the text goes on as the line says
        ((7, 8), [9], 5),
        ((7, 8, 9, 4), [], 5),  # and further than it
        ((7, 5), [], 4),  # it turns off: what was read of the line before that stays
        ((5,), [], 3),
    ],
)
def test_what_a_text_leaves_of_its_line(tokens: tuple[int, ...], line: list[int], cached: int) -> None:
    text = Text(1, [1, 2, 3], drawn=False, cached=5, line=[7, 8, 9])
    text.confirm(tokens)
    assert (text.tokens, text.line, text.cached) == ([1, 2, 3, *tokens], line, cached)
    assert text.lag >= 1, "the last token is read when the next one is drafted"


def test_parameters_survive_json() -> None:
    assert params_of({"logit_bias": [[3, 1.5]], "top_k": 4}) == SamplingParams(logit_bias={3: 1.5}, top_k=4)


@pytest.fixture
def drafter(pair: tuple[Path, Path]) -> Any:  # noqa: F811
    """Over the slots and the draft model of an engine that does not run, with blocks for one long text only."""
    with make(pair, "pd", max_model_len=256, kv_memory="8MB") as llm:
        model = llm.engine.drafter
        assert isinstance(model, ModelDrafter)
        blocks = BlockPool(LEVEL // 8 + 8, 8, prefix_cache=False)
        yield AheadDrafter(model, llm.engine.slots, llm.engine.sampling, blocks, model.runner.tables, eos_ids=())
        for slot in range(2):
            llm.engine.sampling.release(slot)


@pytest.mark.slow
def test_a_line_goes_on_and_is_the_next_draft(drafter: AheadDrafter) -> None:
    drafter.begin(0, 1, [5, 6, 7, 8], FACTS)
    [first] = drafter.ask([Want(0, 1, 2, 1.0, ())])
    assert len(first.tokens) == 2 and not first.ahead
    while drafter.work():
        pass
    line = tuple(drafter.texts[0].line)
    assert line[:2] == first.tokens and len(line) == 5, "the next token is guessed, and a draft of the same length"
    [hit] = drafter.ask([Want(0, 1, 2, 1.0, line[:3])])
    assert hit.tokens == line[3:] and hit.ahead == 2
    [miss] = drafter.ask([Want(0, 1, 2, 1.0, ((line[3] + 1) % 300,))])
    assert len(miss.tokens) == 2 and not miss.ahead
    drafter.begin(1, 2, drafter.texts[0].tokens, {**FACTS, "prompt_len": 4})
    [anew] = drafter.ask([Want(1, 2, 2, 1.0, ())])
    assert anew.tokens == miss.tokens, "what was thrown away has left no trace"


@pytest.mark.slow
def test_a_text_without_room_is_not_drafted_for_until_there_is(drafter: AheadDrafter) -> None:
    long = [3 + i % 200 for i in range(LEVEL)]
    for slot in range(2):
        drafter.begin(slot, slot, long, FACTS)
    assert [number for _, number in drafter.news()] == [0], "the other has no room"
    offers = drafter.ask([Want(slot, slot, 2, 1.0, ()) for slot in range(2)])
    assert [(len(offer.tokens), offer.behind) for offer in offers] == [(2, False), (0, True)]
    drafter.end(0, 0)
    assert drafter.news() == [(1, 1)]
    [offer] = drafter.ask([Want(1, 1, 2, 1.0, ())])
    assert offer.tokens == offers[0].tokens
