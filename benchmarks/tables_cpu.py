"""Tables of CPUs: passes by their rows, engines that use AMX tiles from so many rows on, and a CPU that is shared."""

from __future__ import annotations

import statistics

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
OVER = {
    "single_over_transformers": "one request, plain, against `transformers.generate` in its best dtype",
    "single_fp32_over_transformers": "the same, both in float32",
    "batch16_over_transformers": "16 concurrent requests against sequential `generate`",
    "ngram_over_plain": "n-gram speculation against plain, one request, three prompts that the model goes on repeating",
}
ARM_READ = 269e6 / 36.6e9 * 1e3  # ms to read smollm2's weights in bfloat16
ARM_ROW = 134.5e6 / 80e9 * 1e3  # ms of a row's multiply-adds in float16, on two cores
X86_READ = 269e6 / 20.3e9 * 1e3  # of the x86 CPU without tiles; two cores together
X86_ROW = 134.5e6 / 143e9 * 1e3  # in float32
MAPPED = ("plain", "baseline:4", "pd:4", "pdv:4", "unified:2", "unified:4", "unified:8", "table", "auto")
FIRST = {"0": "no rows", "2": "two rows and more", "1": "all rows"}


def x86_passes() -> str:
    """Time of a pass by its rows, in every kind of numbers."""
    found = {each["rows"]: each for each in read("wide_passes-xeon")["passes"]}
    lines = [
        [name, *(f"{found[count][arm]['ms']:.1f}" for count in SHOWN), f"{found[5][arm]['of_one']:.2f}"]
        for arm, name in ARMS.items()
    ]
    return rows(["ms a pass of", *map(str, SHOWN), "five / one"], lines) + source("wide_passes-xeon")


def panel_passes() -> str:
    """Time of a pass by its rows on an x86 CPU without tiles, with weights in panels and without, and the floor."""
    suffixes = ("", "-acc7fc5", "-float32", "-int8", "-int8-acc7fc5")
    files = [f"wide_passes-cascade-lake{suffix}" for suffix in suffixes]
    found, loose, floats, small, loose_small = ({each["rows"]: each for each in read(file)["passes"]} for file in files)
    counts = (*SHOWN, 64, 128)
    kinds = {"bfloat16, in panels": (found, "bfloat16"), "bfloat16, not in panels": (loose, "bfloat16")}
    kinds |= {
        "float32, in panels": (floats, "float32"),
        "float32, not in panels": (found, "float32"),
        "int8, in panels": (small, "int8"),
        "int8, not in panels": (loose_small, "int8"),
        "bfloat16 as torch multiplies it": (found, "torch"),
    }
    lines = [[called, *(f"{own[n][arm]['ms']:.1f}" for n in counts)] for called, (own, arm) in kinds.items()]
    floors = [max(X86_READ, n * X86_ROW) for n in counts]
    lines.append(["floor of bfloat16: memory, then multiply-adds", *(f"{floor:.1f}" for floor in floors)])
    reached = [floor / found[n]["bfloat16"]["ms"] for n, floor in zip(counts, floors, strict=True)]
    lines.append(["reached in panels", *(f"{share:.0%}" for share in reached)])
    return rows(["ms a pass of", *map(str, counts)], lines) + source(*files)


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


def arm_passes() -> str:
    """Time of a pass by its rows on an ARM CPU, beside what memory and multiply-adds allow in bfloat16."""
    found = {each["rows"]: each for each in read("wide_passes-neoverse-n1")["passes"]}
    counts = [count for count in (*SHOWN, 64) if count in found]
    lines = [[f"{arm}, ms", *(f"{found[n][arm]['ms']:.1f}" for n in counts)] for arm in ("bfloat16", "int8", "float32")]
    floors = [max(ARM_READ, n * ARM_ROW) for n in counts]
    lines.append(["floor of bfloat16, ms: memory, then multiply-adds", *(f"{floor:.1f}" for floor in floors)])
    reached = [floor / found[n]["bfloat16"]["ms"] for n, floor in zip(counts, floors, strict=True)]
    lines.append(["reached", *(f"{share:.0%}" for share in reached)])
    return rows(["rows", *map(str, counts)], lines) + source("wide_passes-neoverse-n1")


def cpu_map() -> str:
    """Tokens/s of every architecture and fixed draft length, and of `auto`, by requests at once: medians of rounds."""
    speeds: dict[int, dict[str, list[float]]] = {}
    for run in read("cpu-map-auto")["runs"]:
        speeds.setdefault(run["concurrency"], {}).setdefault(run["arm"], []).append(run["tokens_per_second"])
    levels = {level: {arm: statistics.median(all_) for arm, all_ in speeds[level].items()} for level in sorted(speeds)}
    lines = [[f"`{name}`", *(f"{own[name]:.0f}" for own in levels.values())] for name in MAPPED]
    lines.append(["`auto` over `plain`", *(f"{own['auto'] / own['plain']:.3f}" for own in levels.values())])
    return rows(["tokens/s at requests at once", *map(str, levels)], lines) + source("cpu-map-auto")


def transformers() -> str:
    """What each arm of the comparison with transformers reached, and ours over it."""
    found = read("cpu_vs_transformers")["figures"]
    lines = [[text, f"{found[name]:.1f} ×"] for name, text in OVER.items()]
    return rows(["", "ratio"], lines) + source("cpu_vs_transformers")


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
