"""`verifypd costs`: what passes take here, measured and as the cost model has them, and what drafting must be worth."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verifypd.bench.breakeven import break_even
from verifypd.cli import running
from verifypd.cli.flags import Command, add_engine_flags, engine_settings
from verifypd.cli.terminal import emit, say
from verifypd.control.cost import CostModel, Work
from verifypd.control.observe import StepTiming
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.drafters.base import Drafter
    from verifypd.engine.measure import Measured

REQUESTS = (1, 8, 32)
LENGTHS = range(1, 9)
CONTEXT = 256  # tokens of each request, for the break-even table
UNITS = {
    "base": "a pass: reading the weights",
    "row": "a row",
    "steep": "a row beyond the knee, more",
    "context": "a token of context",
    "chunk_context": "a chunk token × context token",
    "mixed": "a pass with both decode rows and a chunk",
    "draft_start": "a draft loop",
    "draft_step": "a step of it",
    "draft_context": "a token of context, each step",
    "draft_row": "a token caught up with",
    "overhead": "a step, on the host",
}


def register(command: Command) -> None:
    """Add the command."""
    parser = command("costs", "measure what passes take on this machine", run, "%(prog)s [OPTION …]")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plot", metavar="FILE", help="draw the measured and predicted times (.png, .svg or .pdf)")
    parser.add_argument("--refresh", action="store_true", help="measure even if times of this combination are kept")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does at start")
    add_engine_flags(parser, without=("measure_costs",))


def run(args: argparse.Namespace) -> int:
    """`verifypd costs`."""
    settings = engine_settings(args)
    if args.plot:
        from verifypd.bench import plots

        plots.require(args.plot)  # before anything slow
    with running.load(settings | {"measure_costs": False}) as llm:
        from verifypd.engine import costs

        measured = costs.obtain(llm.engine, fresh=args.refresh)
        if not measured.timings:
            raise ConfigError("no pass fits this engine: raise --max-model-len or --kv-memory")
        cost = costs.fit(CostModel(), measured)
        setup = costs.describe(llm.engine)
        drafter = llm.engine.drafter
    report = summary(cost, measured, setup, drafter)
    if args.plot:
        plots.draw_costs(args.plot, cost, measured, setup, report["break_even"])
        say(f"drawn to {args.plot}")
    emit(json.dumps(report) + "\n" if args.json else "\n".join(show(report)) + "\n")
    return 0


def summary(cost: CostModel, measured: Measured, setup: dict[str, Any], drafter: Drafter | None) -> dict[str, Any]:
    """Everything the command shows, as plain data. Seconds."""
    coefficients = cost.coefficients
    values = {name: value for name, value in asdict(coefficients).items() if name != "knee"}
    return {
        "setup": setup,
        "coefficients": {name: value for name, value in values.items() if _is_measured(name, measured)},
        "overhead": cost.overhead,
        "knee": coefficients.knee if coefficients.steep else None,
        "measured_in": measured.seconds,
        "skipped": measured.skipped,
        "passes": [_pass(cost, timing) for timing in measured.timings],
        "drafts": [_draft(cost, timing) for timing in measured.timings if timing.draft_seconds],
        "break_even": _break_even(cost, setup, drafter),
    }


def _is_measured(name: str, measured: Measured) -> bool:
    """Whether some point depends on a coefficient; the others are a guess of where the model starts, not a finding."""
    feature = {
        "chunk_context": "chunk_context",
        "draft_row": "draft_rows",
        "mixed": "chunk_rows",
        **dict.fromkeys(("draft_start", "draft_step", "draft_context"), "draft_seconds"),
    }.get(name, "verify_rows")
    return any(getattr(timing, feature) for timing in measured.timings)


def _pass(cost: CostModel, timing: StepTiming) -> dict[str, float]:
    work = Work(timing.verify_rows, timing.verify_context, timing.chunk_rows, timing.chunk_context)
    predicted = cost.pass_seconds(work)
    return {
        "requests": timing.verify_requests,
        "rows": timing.verify_rows,
        "chunk": timing.chunk_rows,
        "context": timing.verify_context,
        "measured": timing.verify_seconds,
        "predicted": predicted,
        "error": predicted / timing.verify_seconds - 1.0,
    }


def _draft(cost: CostModel, timing: StepTiming) -> dict[str, float]:
    predicted = cost.draft_seconds(timing.draft_steps, timing.draft_rows, timing.draft_context)
    return {
        "requests": timing.draft_requests,
        "steps": timing.draft_steps,
        "rows": timing.draft_rows,
        "context": timing.draft_context,
        "measured": timing.draft_seconds,
        "predicted": predicted,
        "error": predicted / timing.draft_seconds - 1.0,
    }


def _break_even(cost: CostModel, setup: dict[str, Any], drafter: Drafter | None) -> dict[str, list[float | None]]:
    """requests → the least α that pays for L = 1, 2, …; None: none does. Empty without a drafter."""
    if drafter is None:
        return {}
    counts = sorted({min(count, setup["batch_size"]) for count in REQUESTS})
    lengths = [length for length in LENGTHS if length <= setup["max_draft"]]
    context = min(CONTEXT, setup["max_model_len"])
    return {str(n): [break_even(cost, n, length, context, _lag(drafter, length)) for length in lengths] for n in counts}


def _lag(drafter: Drafter, drafts: int) -> int:
    """Tokens a drafter reads before it drafts, in steady state: a head reads what it drafted again."""
    return min(drafter.routine, drafts + 1) if drafter.has_cache else 0


# -- text --------------------------------------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> list[str]:
    """The report as aligned text."""
    setup = report["setup"]
    model = setup["model"]
    name = f"{model['family']}, {model['parameters'] / 1e6:.0f} M parameters, {model['dtype']}"
    threads = f", {setup['threads']} threads" if setup["threads"] else ""
    lines = [
        f"{name}, {model['kernels']} kernels; drafts: {setup['drafter'] or 'none'}",
        f"{setup['device']}{threads}, torch {setup['torch']}",
        f"{len(report['passes'])} points measured in {report['measured_in']:.1f} s, {report['skipped']} left out",
        "",
        *table(("coefficient", "µs", "for"), _coefficients(report), "<><"),
        "",
    ]
    knee = report["knee"]
    lines.append(f"knee: rows beyond {knee:.0f} cost more" if knee else "knee: every row costs the same")
    header = ("requests", "rows", "chunk", "context", "measured ms", "predicted ms", "error")
    lines += ["", "verifier passes", *table(header, [_line(e, header[:4]) for e in report["passes"]], ">" * 7)]
    if report["drafts"]:
        header = ("requests", "steps", "rows", "context", "measured ms", "predicted ms", "error")
        lines += ["", "draft loops", *table(header, [_line(e, header[:4]) for e in report["drafts"]], ">" * 7)]
    if report["break_even"]:
        lines += ["", f"least acceptance α at which drafts of L tokens pay ({CONTEXT} tokens of context each)"]
        lengths = len(next(iter(report["break_even"].values())))
        rows = [
            (n, *("never" if a is None else f"{a:.2f}" for a in alphas)) for n, alphas in report["break_even"].items()
        ]
        names = ("requests", *(f"L={length}" for length in range(1, lengths + 1)))
        lines += table(names, rows, ">" * (lengths + 1))
    return lines


def _coefficients(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    seconds = report["coefficients"] | {"overhead": report["overhead"]}
    return [(name, _micro(value), UNITS.get(name, "")) for name, value in seconds.items()]


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}" if seconds else "0"


def _line(entry: dict[str, float], names: Sequence[str]) -> tuple[str, ...]:
    counts = [f"{entry[name]:.0f}" for name in names]
    return (*counts, f"{entry['measured'] * 1e3:.2f}", f"{entry['predicted'] * 1e3:.2f}", f"{entry['error']:+.0%}")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Columns as wide as they must be; `align` has < or > for each."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(line, align, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
