"""Tables of settings, made from the classes that the flags are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from cells import rows

from verifypd.cli.flags import ENGINE_FLAGS
from verifypd.config import flag


def settings(config: type[Any]) -> Callable[[], str]:
    """Flag, default and meaning of each field of a config class."""

    def table() -> str:
        shown = [each for each in fields(config) if not each.metadata.get("hidden")]
        return rows(
            ["flag", "default", "what it is"], [[_flag(each), _default(each), _meaning(each)] for each in shown]
        )

    return table


def _flag(each: Field[Any]) -> str:
    return f"`{each.metadata.get('flag') or ENGINE_FLAGS.get(each.name) or flag(each.name)}`"


def _default(each: Field[Any]) -> str:
    if isinstance(each.default, bool):
        return "on" if each.default else "off"
    if each.default is None or each.default in ((), ""):
        return "–"
    return f"`{each.default:g}`" if isinstance(each.default, float) else f"`{each.default}`"


def _meaning(each: Field[Any]) -> str:
    text, choices = each.metadata["help"].replace("|", "\\|"), each.metadata.get("choices", ())
    named = all(re.search(rf"\b{choice}\b", text) for choice in choices)
    return text if named else f"{text} ({', '.join(f'`{choice}`' for choice in choices)})"
