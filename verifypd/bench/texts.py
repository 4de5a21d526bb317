"""Prompts that invite copying, where look-up drafts well, and prose, where it does not. Knows no engine."""

from __future__ import annotations

import itertools
import random
from typing import Any

STRETCH = 3  # requests of one kind in a row, where the text drifts

TEXTS = [
    "def area(width, height):\n    return width * height\n\n",
    "Row, row, row your boat,\nGently down the stream,\n",
    '{"name": "Anna", "age": 31, "city": "Oslo"},\n',
    "2024-03-01 12:00:05 INFO server started on port 8080\n",
    "| apple | 1.20 | red |\n| lemon | 0.80 | yellow |\n",
    "The cat sat on the mat. The dog lay by the door.\n",
    "SELECT name, price FROM items WHERE price > 10;\n",
    "Q: What is the capital of France?\nA: Paris.\n",
    "for i in range(10):\n    print(i, i * i)\n",
    '<li><a href="/home">Home</a></li>\n',
    "One potato, two potato, three potato, four.\n",
    "x = 1, y = 2, z = 3; x = 1, y = 2, z = 3;\n",
]
EDITS = [
    "Text: {0}Copy: {0}Text: {0}Copy: ",
    "{0}{0}{0}",
    "Original:\n{0}Corrected:\n{0}Original:\n{0}Corrected:\n",
]
_FUNCTIONS = (
    "def area(width, height):\n    return width * height\n\n"
    "def volume(width, height, depth):\n    return width * height * depth\n\n"
)
_VERSE = (
    "Row, row, row your boat,\nGently down the stream,\nMerrily, merrily, merrily, merrily,\nLife is but a dream.\n\n"
)
_RECORD = '{"name": "Anna", "age": 31, "city": "Oslo"},\n{"name": "Ben", "age": 45, "city": "Rome"},\n'
BEGUN = (  # the last copy of each is only begun
    _FUNCTIONS * 2 + _FUNCTIONS[:40],
    _VERSE * 2 + _VERSE[:30],
    _RECORD * 3 + _RECORD[:12],
)
PROSE = [
    "Once upon a time, in a village by the sea,",
    "Explain how a refrigerator keeps food cold.",
    "The old man looked at the mountain and said",
    "Write a letter to a friend about your first day at work.",
    "The history of the bicycle begins",
    "My favourite season is autumn, because",
    "Why is the sky blue? The answer is",
    "A good teacher is someone who",
    "In the year 2150 people travelled to Mars, where",
    "The recipe for happiness, according to my grandmother,",
    "Describe a walk through a forest after the rain.",
    "When the music stopped, everybody in the hall",
]


def prompts(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Copying and prose in turn, in a random order of their own."""
    chance = random.Random(seed)
    copying = [form.format(text) for text in TEXTS for form in EDITS]
    prose = list(PROSE)
    chance.shuffle(copying)
    chance.shuffle(prose)
    both = itertools.chain.from_iterable(zip(itertools.cycle(copying), itertools.cycle(prose), strict=False))
    return [tokenizer.encode(text) for text in itertools.islice(both, count)]


def drifting(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Stretches of copying and of prose in turn."""
    mixed = prompts(tokenizer, 2 * count, seed)
    kinds = [iter(mixed[0::2]), iter(mixed[1::2])]
    return [next(kinds[index // STRETCH % 2]) for index in range(count)]
