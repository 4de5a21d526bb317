"""Structures that CUDA sources and Python both write down."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


def in_source(source: Path) -> list[tuple[str, int]]:
    """Names and bytes of the fields of `struct Arguments`."""
    struct = re.search(r"struct Arguments \{(.*?)\};", source.read_text(), re.DOTALL)
    assert struct
    fields = []
    for line in struct[1].strip().splitlines():
        field = re.fullmatch(r"\s*(?:const )?(\w+) (.*);", line)
        assert field, line
        for name in field[2].split(","):
            fields.append((name.strip(" *"), 8 if "*" in name or field[1] == "wide" else 4))
    return fields


def in_python(structure: type[ctypes.Structure]) -> list[tuple[str, int]]:
    """The same of a structure of ctypes."""
    return [(name, getattr(structure, name).size) for name, *_ in structure._fields_]
