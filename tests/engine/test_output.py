"""Text of tokens as they arrive: the same whole, one by one or in any pieces, with and without stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verifypd.engine.output import TextOutput
from verifypd.request import Request, SamplingParams, State
from verifypd.tokenizer import Tokenizer

TEXT = "Größe: 12 €, ein Häuschen — and then some more of the same, 日本"


@pytest.mark.parametrize("params", [{}, {"stop": ["never"]}, {"stop": ["some"]}])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_text_in_pieces(pair: tuple[Path, Path], params: dict[str, Any], size: int) -> None:
    tokenizer = Tokenizer.from_folder(pair[0])
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    request = Request("r", [5, 6], SamplingParams(max_tokens=500, **params), seed=0, max_length=500)
    output, stopped, shown = TextOutput(request, tokenizer), False, ""
    for at in range(0, len(ids), size):
        request.tokens.extend(ids[at : at + size])
        stopped = stopped or output.update()
        assert output.visible().startswith(shown), "what was shown is never taken back"
        shown = output.visible()
    request.state, request.finish_reason = State.FINISHED, "length"
    if not stopped:
        output.update()
    expected = tokenizer.decode([5, 6, *ids])[len(tokenizer.decode([5, 6])) :]
    if params.get("stop") == ["some"]:
        assert stopped and output.text == expected[: expected.index("some")]
    else:
        assert not stopped and output.text == expected
