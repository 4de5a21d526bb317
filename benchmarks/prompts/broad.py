"""Makes the broad training prompts: of kinds that neither the first training set nor `unseen.jsonl` has.

`broad.txt` has the forms of each kind (`# kind`, one a line) and lists of words (`= name`, a line or a semicolon
each). A form's slots are filled at random, from a fixed seed: with those words, with topics, and with texts of the
public sets, word problems and function headers, where a passage is wanted.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from pathlib import Path

EACH = 170  # prompts of a kind at most
NUMBERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 18, 20, 24, 25, 30, 36, 45, 60, 75)
LONGEST = 500  # characters of a passage


def broad(topics: Sequence[str], problems: Sequence[str], codes: Sequence[str]) -> list[tuple[str, str]]:
    """(kind, text) of every broad prompt. topics: besides those of the file; problems and codes are the passages."""
    forms, words = _read(Path(__file__).with_suffix(".txt"))
    words["topic"] += topics
    words["problem"] = [text for text in problems if len(text) < LONGEST]
    words["code"] = [text for text in codes if len(text) < LONGEST]
    words["number"] = [str(number) for number in NUMBERS]
    made: dict[str, str] = {}  # text -> kind
    for kind, own in forms.items():
        draw = random.Random(kind)
        for number in range(EACH):
            made.setdefault(_fill(own[number % len(own)], words, draw), kind)
    return [(kind, text) for text, kind in made.items()]


def _read(path: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Forms by kind, and words by the name of their slot."""
    forms: dict[str, list[str]] = {}
    words: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
        if line.startswith(("# ", "= ")):
            lines = (forms if line[0] == "#" else words).setdefault(line[2:], [])
        elif any(lines is own for own in forms.values()):
            lines.append(line.replace("\\n", "\n"))
        else:
            lines += filter(None, (part.strip() for part in line.split(";")))
    return forms, words


def _fill(form: str, words: dict[str, list[str]], draw: random.Random) -> str:
    """The form with each slot filled from its list, and a capital letter first."""
    parts = []
    for text, slot, _, _ in string.Formatter().parse(form):
        parts.append(text)
        if slot is not None:
            parts.append(draw.choice(words[slot]))
    filled = "".join(parts)
    return filled[:1].upper() + filled[1:]
