"""Every number that was chosen stands in tuning.py with unit and origin; there are few, and the package is small."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import verifypd.control
from verifypd.control import tuning

PACKAGE = Path(verifypd.control.__file__).parent
FREE = (0, 1, 2)
UNITS = (1e2, 1e3, 1e9)  # percent, ms, GB
MOST_NUMBERS = 15
MOST_LINES = 1900

EXEMPT = {  # module → names under which other numbers may stand, and why they are nobody's to tune
    "acceptance": {
        "LOW": "keeps chances off 0 and 1",
        "HIGH": "keeps chances off 0 and 1",
    },
    "architectures": {"select_architecture": "the original's advice"},
    "auto": {"KEPT": "how long the record is"},
    "controller": {"ThresholdController": "the original's thresholds"},
    "cost": {"Coefficients": "defaults, replaced by the first measurement"},
    "fit": {"RIDGE": "numerical"},
    "prompts": {"PRECISION": "where a search ends", "COUNTED": "bounds what the host looks at"},
    "snapshot": {"RequestView": "defaults of the command line", "Snapshot": "defaults of the command line"},
    "temperature": {
        "TAU_LOW": "the range that is promised",
        "TemperatureSearch": "off by default: a hash, and how a search tests its steps",
        "_Climb": "off by default: how a search tests its steps",
    },
    "throughput": {"max_draft": "a default of the command line"},
}


def numbers(module: str, source: str) -> Iterator[tuple[str, float, int]]:
    """(path of names it stands under, value, line) of every number of a module that is not free or a unit."""

    def names(node: ast.AST) -> list[str]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            return [node.name]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        return []

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, float, int]]:
        path = (*path, *names(node))
        if isinstance(node, ast.arguments):  # a default stands under its argument's name
            plain = [*node.posonlyargs, *node.args]
            pairs = [*zip(reversed(plain), reversed(node.defaults), strict=False)]
            pairs += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            for argument, default in pairs:
                if default is not None:
                    yield from walk(default, (*path, argument.arg))
            return
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # an index is no number to tune
            yield from walk(node.value, path)
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            unit = isinstance(node.value, float) and node.value in UNITS
            if node.value not in FREE and not unit:
                yield ".".join((module, *path)), node.value, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from walk(child, path)

    yield from walk(ast.parse(source), ())


def tunable(module: str, source: str) -> list[tuple[str, float, int]]:
    allowed = EXEMPT.get(module, {})
    return [found for found in numbers(module, source) if not allowed.keys() & set(found[0].split(".")[1:])]


def modules() -> list[Path]:
    return sorted(PACKAGE.glob("*.py"))


def test_no_number_that_could_be_tuned_stands_outside_tuning() -> None:
    found = [each for path in modules() if path.stem != "tuning" for each in tunable(path.stem, path.read_text())]
    listed = "\n".join(f"{where} = {value} (line {line})" for where, value, line in found)
    assert not found, f"{len(found)} numbers belong into tuning.py, or are exempt for a reason:\n{listed}"


def test_there_are_few_numbers_to_tune() -> None:
    source = Path(tuning.__file__).read_text()
    assert 0 < len(list(numbers("tuning", source))) <= MOST_NUMBERS


def test_every_number_says_what_it_is_in_which_unit_and_where_it_is_from() -> None:
    """What it is stands behind it, its unit and origin above it."""
    above = ""
    for line in Path(tuning.__file__).read_text().splitlines():
        if line.startswith("# --"):
            continue  # a heading
        if line.startswith("#"):
            above += line.removeprefix("#")
            continue
        if "=" in line.split("#")[0]:
            assert len(line.partition("#")[2].split()) >= 3, line
            assert re.fullmatch(r" unit: \w[^.]*\. Origin: \w.{9,}", above), f"{line}: {above}"
        above = ""


def test_every_number_is_used() -> None:
    """By some module of the package, and not only as text."""
    words = set()
    for path in modules():
        if path.stem != "tuning":
            with path.open("rb") as file:
                words |= {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}
    named = {name for name in vars(tuning) if name.isupper()}
    assert named and named <= words


def test_the_package_is_small() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in modules()}
    assert sum(lines.values()) <= MOST_LINES, f"{sum(lines.values())} lines: {lines}"


def test_exemptions_are_all_needed() -> None:
    for module, names in EXEMPT.items():
        found = list(numbers(module, (PACKAGE / f"{module}.py").read_text()))
        for name in names:
            assert any(name in where.split(".") for where, *_ in found), f"{module}.{name} needs no exemption"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("X = 3", ["m.X"]),
        ("X: float = 0.5", ["m.X"]),
        ("X, Y = 3, -4", ["m.X.Y", "m.X.Y"]),
        ("class A:\n    LIMIT = 50e-3", ["m.A.LIMIT"]),
        ("def f(a, b=7, *, c=8):\n    return a * 1e3 + 0.25", ["m.f.b", "m.f.c", "m.f"]),
        ("def f(x):\n    return x[3] if x > 2 else x[0] / 2.0 - 1", []),
        ("def f(x):\n    return [y for y in x if y > 9]", ["m.f"]),
        ("FLAG = True", []),
    ],
)
def test_numbers_are_found_wherever_they_stand(source: str, found: list[str]) -> None:
    assert [where for where, *_ in numbers("m", source)] == found
