"""`verifypd evaluate-draft`: how good a draft is for its verifier."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from verifypd.cli.campaign import command_line
from verifypd.cli.files import writable_file
from verifypd.cli.flags import Command
from verifypd.cli.terminal import emit, say
from verifypd.errors import ConfigError


def register(command: Command) -> None:
    """Add the command."""
    parser = command("evaluate-draft", "acceptance, cost, calibration and speed-up of a draft", run)
    parser.add_argument("--model", default="smollm2", help="verifier (default: smollm2)")
    parser.add_argument("--draft", default="auto", help="draft, as for 'generate' (default: auto)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line (default: the held-out set)")
    parser.add_argument("--count", type=int, metavar="N", help="use N prompts, spread over the set (default: all)")
    parser.add_argument("--temperatures", default="0,0.8", metavar="T,T", help="request temperatures (default: 0,0.8)")
    parser.add_argument(
        "--tau-temperatures",
        default="0.3,0.7,1.0",
        metavar="T,T",
        help="request temperatures at which drafter temperatures are compared (default: 0.3,0.7,1.0)",
    )
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens of an answer (default: 96)")
    parser.add_argument("--max-draft", type=int, default=4, metavar="N", help="tokens of a draft (default: 4)")
    parser.add_argument("--timed", type=int, default=6, metavar="N", help="prompts that are timed alone (default: 6)")
    parser.add_argument("--draft-layers", metavar="IDS", help="states an EAGLE-3 head reads, as for 'generate'")
    parser.add_argument(
        "--search-layers",
        action="store_true",
        help="only find the states an EAGLE-3 head was trained to read, for --draft-layers",
    )
    parser.add_argument("--dtype", default="auto", help="weights, as for 'generate'")
    parser.add_argument("--quantization", choices=("int8", "fp8"), help="as for 'generate'")
    parser.add_argument(
        "--draft-quantization",
        choices=("auto", "int8", "fp8", "none"),
        default="auto",
        help="the draft's weights, as for 'generate'",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture there (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """`verifypd evaluate-draft`."""
    from verifypd.bench import plots
    from verifypd.bench.provenance import provenance
    from verifypd.distil import prompts
    from verifypd.distil.evaluate import Trial, draw, evaluate

    heated = _numbers(args.tau_temperatures, "--tau-temperatures")
    if any(not temperature > 0 for temperature in heated):
        raise ConfigError("--tau-temperatures must be above 0: a greedy request draws nothing that could be heated")
    if args.draft in ("none", ""):
        raise ConfigError("--draft none drafts nothing that could be evaluated: name a draft")
    if args.search_layers and args.draft == "auto":
        raise ConfigError("--search-layers needs --draft: the EAGLE-3 head whose states are looked for")
    if args.tokens < 1 or args.max_draft < 1 or args.timed < 1 or (args.count is not None and args.count < 1):
        raise ConfigError("--tokens, --max-draft, --timed and --count must be positive")
    if args.json:
        writable_file("--json", args.json)
    if args.plot:
        plots.require(args.plot)
    given = prompts.read_prompts(args.prompts) if args.prompts else prompts.evaluation_prompts()
    if args.count:
        given = prompts.spread(given, args.count)
    settings = {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "draft_quantization": args.draft_quantization,
        "device": args.device,
    }
    made = provenance(command=command_line(sys.argv[1:]))  # of the tree as it is now, before anything runs
    if args.search_layers:
        return _search(args, given, settings, made)
    report = evaluate(
        Trial(
            model=args.model,
            draft=args.draft,
            prompts=tuple(given),
            temperatures=_numbers(args.temperatures, "--temperatures"),
            tau_temperatures=heated,
            tokens=args.tokens,
            length=args.max_draft,
            timed=args.timed,
            settings={**settings, "draft_layers": args.draft_layers},
        )
    )
    emit(table(report))
    _write(args, report, made)
    if args.plot:
        draw(report, args.plot)
        say(f"drawn: {args.plot}")
    return 0


def _write(args: argparse.Namespace, report: dict[str, Any], made: dict[str, Any]) -> None:
    """The report as JSON where one is asked for, with what made it."""
    from verifypd.distil.export import write_json

    if args.json:
        write_json(args.json, {**report, **made})


def _search(args: argparse.Namespace, prompts: list[Any], settings: dict[str, Any], made: dict[str, Any]) -> int:
    from verifypd.distil.search import search_layers

    report = search_layers(args.model, args.draft, prompts, settings)
    for found in report["best"]:
        emit(f"{','.join(map(str, found['states'])):16} agrees on {100 * found['agreement']:.1f} %\n")
    best = report["best"][0]
    own = report["configured"] or report["usual"]
    if best["states"] == own:
        say(f"the states it reads, {','.join(map(str, own))}, are the best of {report['tried']} choices")
    else:
        mine = f"{100 * report['agreement_configured']:.1f} % with {','.join(map(str, own))}"
        say(f"use --draft-layers {','.join(map(str, best['states']))} (best of {report['tried']} choices; {mine})")
    _write(args, report, made)
    return 0


def table(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"{report['draft']} for {report['verifier']}, drafts of {report['draft_length']}"]
    for temperature, kinds in report["acceptance"].items():
        for kind, found in kinds.items():
            alphas = "  ".join(f"{alpha:.3f}" for alpha in found["alpha"])
            length = found["mean_accepted_length"]
            lines.append(f"T = {temperature:<4} {kind:9} α {alphas}   accepted length {length:.2f}   {found['spans']}")
    for temperature, taus in report["overlap_by_tau"].items():
        best = max(taus, key=lambda tau: taus[tau])
        lines.append(f"T = {temperature:<4} Σ min(p, q) {json.dumps(taus).strip('{}')}   best τ = {best}")
    speed = report["speed"]
    lines.append(
        f"verifier step {speed['verifier_step_ms']} ms, draft step {speed['draft_step_ms']} ms"
        f" (ratio {speed['cost_ratio']}), span {speed['verify_span_ms']} ms"
    )
    lines.append(
        f"speed-up: predicted {speed['predicted_speedup']}, measured {speed['measured_speedup']};"
        f" same text {speed['same_text']} of {speed['prompts']}"
    )
    lines.append(f"calibration error {report['calibration']['error']}")
    return "\n".join(lines) + "\n"


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not a comma-separated list of numbers") from None
