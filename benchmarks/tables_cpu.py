"""Tables of CPUs: passes by their rows, engines that use AMX tiles from so many rows on, and a CPU that is shared."""

from __future__ import annotations

from cells import read, rows, source

SHOWN = (1, 2, 3, 5, 9, 16, 32)
ARMS = {
    "bfloat16 by tiles": "bfloat16 by tiles",
    "bfloat16 by vectors": "bfloat16 by vectors",
    "int8": "int8, one row by vectors, more by tiles",
    "int8 by vectors": "int8 by vectors",
    "float32": "float32",
    "torch": "bfloat16 as torch multiplies it",
}
FIRST = {"0": "no rows", "2": "two rows and more", "1": "all rows"}


def x86_passes() -> str:
    """Time of a pass by its rows, in every kind of numbers."""
    found = {each["rows"]: each for each in read("wide_passes-xeon")["passes"]}
    lines = [
        [name, *(f"{found[count][arm]['ms']:.1f}" for count in SHOWN), f"{found[5][arm]['of_one']:.2f}"]
        for arm, name in ARMS.items()
    ]
    return rows(["ms a pass of", *map(str, SHOWN), "five / one"], lines) + source("wide_passes-xeon")


def x86_tiles() -> str:
    """One request without drafts, with four, and 16 requests, by the rows that tiles take."""
    lines = []
    for numbers, name in (("bfloat16", "tile_rows-xeon"), ("int8", "tile_rows-xeon-int8")):
        jobs = read(name)["jobs"]
        for first, called in FIRST.items():
            times = [f"{jobs[job][first]['pass_ms']:.1f}" for job in ("plain", "drafts", "crowd")]
            lines.append([numbers, called, *times, f"{jobs['crowd'][first]['tokens_per_second']:.0f}"])
    header = ["numbers", "by tiles", "one request, ms a pass", "with four drafts", "16 requests", "their tokens/s"]
    return rows(header, lines) + source("tile_rows-xeon", "tile_rows-xeon-int8")


def busy_machine() -> str:
    """Tokens/s beside other programs, by how often threads ask before they sleep."""
    found = read("busy-machine")
    asked = found["asked"]
    lines = [
        [f"`{cell['kind']}`", str(cell["programs"]), *(_range(cell["arms"][arm]) for arm in asked)]
        for cell in found["cells"]
    ]
    header = ["engine", "other programs", *(f"asks {int(times):,} times" for times in asked.values())]
    return rows(header, lines) + source("busy-machine")


def _range(cell: dict[str, float]) -> str:
    return f"{cell['tok_s']:.0f} ({cell['least']:.0f} to {cell['most']:.0f})"
