"""The text that a cache in eight bits takes its scales from. Knows tokens; nothing of tensors.

Which entries of a head's keys are large depends on the model far more than on the text: 256 tokens of several kinds
find them, and the scales leave room for more (see kv/fp8.py).
"""

from __future__ import annotations

import random

from verifypd.tokenizer import Tokenizer

TOKENS = 256
TEXT = """The harbour was quiet when the first boats came in. "Eleven crates," said the clerk, "and not one is dry."
Nobody answered; it had rained since Tuesday, and the prices on the board (4.20, 3.85, 12.00) had been washed away.

def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

User: Why is the sky blue, and why is it red in the evening?
Assistant: Air scatters short waves more than long ones, about as 1/λ⁴. In the evening light comes a longer way:

| hour | path | colour |
|---|---|---|
| 12:00 | 1 | blue |
| 19:30 | 38 | red |

Il pleut depuis trois jours. Das Wetter wird morgen besser. 今天天气很好，我们去公园吧。 Сегодня хорошая погода.
{"id": 17, "tags": ["a", "b"], "next": null} SELECT name, COUNT(*) FROM visits WHERE year >= 1998 GROUP BY name;
https://example.org/a?b=1
"""


def sample(tokenizer: Tokenizer | None, vocab: int, longest: int) -> list[int]:
    """Token ids below `vocab`, at most `longest`; drawn at random where there is no tokenizer, or it knows no text."""
    count = min(TOKENS, longest)
    known = [] if tokenizer is None else [min(token, vocab - 1) for token in tokenizer.encode(TEXT)[:count]]
    draw = random.Random(0)
    return known or [draw.randrange(vocab) for _ in range(count)]
