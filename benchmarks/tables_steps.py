"""Tables of the planner, of drafts and of what steps cost: targets, a toy, the host's work, numbers in fp8."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from cells import HERE, TAIL_FIGURES, TAIL_RATIOS, TAILS, interval, read, rows, source, tails

from verifypd.control.cost import Coefficients, CostModel, Work

TARGETS, BOUND, PLANNERS = "h200-targets-16", "h200-targets-bound", ("h200-planner-813d00b", "h200-planner")
DRIFT, WORK = "pass-drift-h200", ("verify_rows", "verify_context", "chunk_rows", "chunk_context")
ATTENTION = ("attention-h200", "attention-chunks-h200")
DISTILLED = "verifypd/models/data/smollm2-draft/distil.json"
TOYS = ("toy-schedule", "toy-schedule-traffic")  # costs as measured at the start, and as steps took in traffic
SHAPES = (
    ("h200-qwen2-steps", "h200-qwen2-closed"),
    ("h200-gemma",),
    ("h200-34b-steps", "h200-34b-closed", "h200-34b-one"),
)


def planner() -> str:
    """The planner beside the rules before it, with a draft model; ratios are over the rule of the same ms. Of each rate
    the last run."""
    found: dict[int, list[dict[str, Any]]] = {}
    for name in PLANNERS:
        mine = [cell | {"commit": read(name)["commit"][:7]} for cell in read(name)["cells"]]
        beside = {cell["rate"] for cell in mine if cell["arm"].startswith("other")}
        found |= {rate: [cell for cell in mine if cell["rate"] == rate] for rate in beside}
    lines = []
    for rate in sorted(found):
        for cell in found[rate]:
            kind, _, budget = cell["arm"].partition("=")
            ours = kind == "gap"
            arm = f"{cell['commit']}, `--slo-gap {budget}`" if ours else f"4342614, {cell['arm'][6:]} ms rule"
            over = [interval(cell["over"][f"other:{budget}"][name]) for name in TAIL_FIGURES] if ours else [""] * 3
            lines.append([str(rate), arm, *tails(cell["figures"]), *over])
    return rows(["requests/s", "planner", *TAILS, *TAIL_RATIOS], lines) + source(*PLANNERS)


def targets() -> str:
    """The planner under other targets; ratios are over the first line."""
    lines = []
    for cell in read(TARGETS)["cells"]:
        over = cell["over"].get("ttft=500")
        ratios = [interval(over[figure]) for figure in TAIL_FIGURES] if over else [""] * 3
        lines.append([f"`--slo-{cell['arm'].replace('=', ' ')}`", *tails(cell["figures"]), *ratios])
    return rows(["target, ms", *TAILS, *TAIL_RATIOS], lines) + source(TARGETS)


def targets_bound() -> str:
    """Targets beside one that binds: of first tokens, then of time per token. Ratios are over the loosest of each."""
    lines, loosest = [], dict[str, dict[str, float]]()
    for cell in read(BOUND)["cells"]:
        asked = {"gap": "30"} | dict(part.split("=") for part in cell["arm"].split(","))
        figures = cell["figures"]
        first = loosest.setdefault(asked["gap"], figures)
        over = ["" if first is figures else f"{figures[n] / first[n]:.2f}" for n in ("ttft_ms_p95", "tpot_ms_p95")]
        lines.append([*(asked[name] for name in ("gap", "ttft", "tpot")), *tails(figures), *over])
    header = ["`--slo-gap`", "`--slo-ttft`", "`--slo-tpot`", *TAILS, "× TTFT p95", "× TPOT p95"]
    return rows(header, lines) + source(BOUND)


def gaps(name: str) -> Callable[[], str]:
    """Gaps of a run at the default bound."""

    def table() -> str:
        lines = []
        for cell in sorted(read(name)["cells"], key=lambda cell: (cell["arm"], cell["rate"])):
            arm = "`plain`" if cell["arm"].startswith("plain") else "`auto`, 1.1B draft"
            lines.append([arm, str(cell["rate"]), *tails(cell["figures"])])
        return rows(["", "requests/s", *TAILS], lines) + source(name)

    return table


def priced() -> str:
    """By how much the formula that an engine fitted at its start prices the steps of traffic too low, by their kind."""
    kept, model = read(DRIFT)["steps"], CostModel(Coefficients(**read(PLANNERS[-1])["costs"]))
    model.padded = True
    steps = [dict(zip(kept["columns"], row, strict=True)) for row in kept["steps"]]

    def one(step: dict[str, float]) -> float:
        return model.pass_seconds(Work(*(step[each] for each in WORK)))

    def loop(step: dict[str, float]) -> float:
        return model.draft_seconds(int(step["draft_steps"]), step["draft_rows"], step["draft_context"])

    passes, loops = ("verify_us", "chunk_rows", one), ("draft_us", "draft_rows", loop)
    kinds = {
        "passes without prompts": (passes, 0, 0),
        "passes with up to 512 prompt tokens": (passes, 1, 512),
        "passes with more": (passes, 513, math.inf),
        "draft loops that read at most 64 tokens": (loops, 0, 64),
        "draft loops that read more, for prompts": (loops, 65, math.inf),
    }
    lines = []
    for kind, ((time, count, price), least, most) in kinds.items():
        own = [step for step in steps if step[time] and least <= step[count] <= most]
        took = sum(step[time] for step in own) * 1e-6
        lines.append([kind, f"{took:.1f}", f"{100 * (1 - sum(map(price, own)) / took):.0f} %"])
    return rows(["work", "took, s", "priced too low by"], lines) + source(DRIFT, PLANNERS[-1])


def toy() -> str:
    """The engine, and a toy of its schedule on the same arrivals, with either costs; the last run of each rate."""
    found = [
        {
            (cell["arm"].startswith("plain"), cell["rate"]): cell
            for cell in read(name)["cells"]
            if "gap=45" in cell["arm"]
        }
        for name in TOYS
    ]
    lines = []
    for (plain, rate), cell in sorted(found[0].items()):
        ours, theirs = cell["engine"], [each[plain, rate] for each in found]
        line = ["`plain`" if plain else "`auto`, 1.1B draft", str(rate)]
        for name, digits in (("ttft_ms_p95", 0), ("tpot_ms_p95", 1)):
            line.append(f"{ours[name]:.{digits}f}")
            line += [f"{each['toy'][name]:.{digits}f} ({each['over'][name]:.2f})" for each in theirs]
        lines.append([*line, f"{ours['gap_ms_max']:.0f}"])
    toys = ["toy, costs at start", "toy, costs in traffic"]
    header = ["", "requests/s", "TTFT p95, ms", *toys, "TPOT p95, ms", *toys, "longest gap, ms"]
    files = [each["file"].removesuffix(".json") for each in read(TOYS[0])["of"]]
    return rows(header, lines) + source(*TOYS, *files)


def toy_simulated() -> str:
    """The planner and the toy in the simulator, on seeds that no rule was chosen on."""
    cells = read("toy-simulated")["cells"]
    rates = sorted({cell["rate"] for cell in cells})
    found = {(cell["arm"], cell["rate"]): f"{cell['ttft_ms_p95']:.0f} / {cell['tpot_ms_p95']:.1f}" for cell in cells}
    lines = [[arm, *(found[arm, rate] for rate in rates)] for arm in dict.fromkeys(cell["arm"] for cell in cells)]
    return rows(["p95 of TTFT / TPOT, ms", *(f"{rate} requests/s" for rate in rates)], lines) + source("toy-simulated")


def shapes() -> str:
    """Steps and closed loop of other models' shapes, each with its draft model."""
    lines = []
    for names in SHAPES:
        found = [read(name) for name in names]
        figures = {key: value for each in found for key, value in each["figures"].items()}
        verifier, draft = found[0]["pair"].split(",")
        steps = ["plain_step_ms_1", "draft_step_ms_1", *(f"cycle_ms_{n}" for n in (1, 8, 32))]
        pairs = [(figures.get(f"tok_s_{n}"), figures.get(f"plain_tok_s_{n}")) for n in (1, 8, 32)]
        speeds = [f"{ours:,.0f} / {plain:,.0f}" if ours and plain else "–" for ours, plain in pairs]
        lines.append([f"{verifier} + {draft.rpartition('-')[2]}", *(f"{figures[name]:.2f}" for name in steps), *speeds])
    header = ["pair", "plain step, ms", "draft step", "cycle of four drafts, 1 request", "8", "32"]
    header += [f"tokens/s, `auto` / `plain`, {n}" for n in (1, 8, 32)]
    return rows(header, lines) + source(*(name for names in SHAPES for name in names))


def engine() -> str:
    """Steps, cycles and the closed loop of one engine, with a head and with a draft model, by requests at once."""
    head, draft = read("h200-head-steps"), read("h200-draft-steps")
    levels = (1, 8, 32, 128)

    def cycle(found: dict[str, Any], drafts: int, n: int) -> str:
        step = found["details"]["steps"][f"{n}x{drafts + 1}"]
        return f"{step['draft_ms'] + step['verify_ms']:.2f}"

    lines = [
        ["plain step, ms", *(cycle(head, 0, n) for n in levels)],
        ["cycle of four drafts, head, ms", *(cycle(head, 4, n) for n in levels)],
        ["cycle of four drafts, 1.1B draft, ms", *(cycle(draft, 4, n) for n in levels)],
        ["closed loop, `plain`, tokens/s", *(f"{head['figures'][f'plain_tok_s_{n}']:,.0f}" for n in levels)],
        ["closed loop, head, tokens/s", *(f"{head['figures'][f'tok_s_{n}']:,.0f}" for n in levels)],
        ["closed loop, 1.1B draft, tokens/s", *(f"{draft['figures'][f'tok_s_{n}']:,.0f}" for n in levels)],
    ]
    return rows(["requests", *map(str, levels)], lines) + source("h200-head-steps", "h200-draft-steps")


def host() -> str:
    """What the host works in a step, against the cycle of the device."""
    found = read("h200-head-steps-e6dcef9")
    levels = sorted((int(name[5:]), each) for name, each in found["details"].items() if name.startswith("idle_"))
    lines = [
        ["host, ms a step", *(f"{each['host_ms']:.2f}" for _, each in levels)],
        ["device's cycle, ms", *(f"{each['cycle_ms']:.2f}" for _, each in levels)],
        ["share", *(f"{each['host_ms'] / each['cycle_ms']:.2f}" for _, each in levels)],
        ["device idle", *(f"{each['idle']:.1%}" for _, each in levels)],
    ]
    return rows(["requests", *(str(level) for level, _ in levels)], lines) + source("h200-head-steps-e6dcef9")


def attention() -> str:
    """Attention of a layer, with prompt chunks also as Triton's kernel had it."""
    now, triton = (
        {case["case"]: case for case in read(name)["times"] if case["shape"] == "llama-2-7b"} for name in ATTENTION
    )
    lines = []
    for name, case in now.items():
        before = f"{triton[name]['us']:.0f}" if "chunk" in name and name in triton else ""
        lines.append([name, f"{case['us']:.0f}", before, f"{case['floor_us']:.0f}", f"{case['of_floor']:.0%}"])
    return rows(["case", "µs", "Triton's, µs", "floor, µs", "floor over µs"], lines) + source(*ATTENTION)


def eight_bits() -> str:
    """Steps and KV capacity with weights, keys and values in fp8."""
    arms, levels = read("fp8-h200")["steps"], (1, 8, 32, 128)
    lines = [
        [
            name,
            *(f"{arm[f'{kind}_ms_{n}']:.2f}" for kind in ("plain", "cycle") for n in levels),
            f"{arm['kv_tokens']:,}",
        ]
        for name, arm in arms.items()
    ]
    header = ["", *(f"{kind}, {n}" for kind in ("plain", "cycle") for n in levels), "KV tokens"]
    return rows(header, lines) + source("fp8-h200")


def distilled() -> str:
    """What the built-in draft's tokens came to at the end of its training, by kind of prompt."""
    found = json.loads((HERE.parent / DISTILLED).read_text())
    lines = []
    for kind in found["evaluation"]["0.0"]:
        line = ["all kinds" if kind == "all" else kind]
        for temperature in ("0.0", "0.8"):
            own = found["evaluation"][temperature][kind]
            line += [" ".join(f"{alpha:.3f}" for alpha in own["alpha"]), f"{own['mean_accepted_length']:.2f}"]
        lines.append(line)
    header = ["", "greedy: α by position", "tokens a pass", "temperature 0.8: α", "tokens a pass"]
    return rows(header, lines) + f"\nFrom [`distil.json`](../{DISTILLED}) ({found['commit'][:7]}).\n"


def draft_kinds() -> str:
    """What the built-in draft's tokens come to, on kinds of prompts it was distilled on and on others."""
    seen, unseen = "evaluate-draft", "evaluate-draft-unseen"
    lines = []
    for name, title in ((seen, "distilled on"), (unseen, "**not distilled on**")):
        found = read(name)["acceptance"]
        for kind in sorted(found["0"], key=lambda each: each != "all"):
            line = [f"{title}, all" if kind == "all" else kind]
            for temperature in ("0", "0.8"):
                own = found[temperature][kind]
                line += [" ".join(f"{alpha:.2f}" for alpha in own["alpha"]), f"{own['mean_accepted_length']:.2f}"]
            lines.append(line)
    header = ["kinds of prompts", "greedy: α by position", "tokens a pass", "temperature 0.8: α", "tokens a pass"]
    return rows(header, lines) + source(seen, unseen)
