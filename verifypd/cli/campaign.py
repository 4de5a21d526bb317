"""Runs what a `verifypd bench` command asks for: flags of a run, progress on the terminal, the report at the end."""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.cli.files import writable_folder
from verifypd.cli.flags import ENGINE, Parser, refuse_given
from verifypd.cli.terminal import INTERRUPTED, emit, say
from verifypd.config import flag
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.bench.campaign import Cell, Scenario, Turn, Watch
    from verifypd.bench.play import Arm, Call
    from verifypd.progress import Rows

SECRETS = ("--api-key", "--hf-token", "--control-key")
TARGET_MS = {"slo_ttft": 500.0, "slo_tpot": 15.0}
SEEDS = 3
GRACE = 600.0  # s; a run ends then, whatever became of it
EACH = 300.0  # s; so long a request may take


def add_run_flags(parser: Parser) -> None:
    """Flags of every command that runs something."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the report; a run goes on there"
    )
    group.add_argument("--quick", action="store_true", help="few and short requests: to try it out")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed (default: 0)")
    group.add_argument("--seeds", type=int, metavar="N", help=f"how many (default: {SEEDS})")
    group.add_argument(
        "--duration", type=float, metavar="S",
        help="open loop: requests arrive for S seconds; else a run is cut off after S seconds",
    )  # fmt: skip
    group.add_argument("--cut-off", type=float, metavar="S", help=f"end a run after S seconds (default: {GRACE:g})")
    group.add_argument("--max-concurrent", type=int, metavar="N", help="open loop: requests under way at most")
    group.add_argument(
        "--request-timeout", type=float, default=EACH, metavar="S",
        help=f"stop a request after S seconds (default: {EACH:g})",
    )  # fmt: skip
    group.add_argument(
        "--workload", action="append", type=Path, metavar="FILE",
        help="play this workload (DIR/workloads has some) in place of generated ones; may be repeated",
    )  # fmt: skip
    group.add_argument("--vocab", type=int, metavar="N", help="send random prompts as token ids below N, not as words")
    group.add_argument("--reference", metavar="ARM", help="compare the others with this arm (default: the first)")
    group.add_argument("--no-control", action="store_true", help="do not run the reference twice")
    group.add_argument("--no-png", action="store_true", help="no PNGs beside the page, which needs none")
    group.add_argument("--plan", action="store_true", help="say what would be run, and run nothing")


def add_target_flags(parser: Parser) -> None:
    """Targets of a command that has no flags of an engine."""
    for name, text in (("ttft", "the first token"), ("tpot", "each token after it")):
        default = TARGET_MS[f"slo_{name}"]
        parser.add_argument(
            f"--slo-{name}", type=float, dest=f"{ENGINE}slo_{name}", default=argparse.SUPPRESS, metavar="MS",
            help=f"target for {text}, ms (default: {default:g})",
        )  # fmt: skip


def own_targets(args: argparse.Namespace) -> dict[str, float]:
    """Targets that were given, ms; 0 is an engine's word for its default."""
    given = {name: getattr(args, ENGINE + name, None) or 0.0 for name in TARGET_MS}
    for name, value in given.items():
        if value < 0:
            raise ConfigError(f"{flag(name)} must be above 0")
    return {name: value for name, value in given.items() if value}


def chosen_seeds(args: argparse.Namespace, default: int = SEEDS) -> list[int]:
    """Those of --seed and --seeds."""
    for name in ("duration", "cut_off", "request_timeout", "max_concurrent", "num_requests", "vocab"):
        value = getattr(args, name, None)
        if value is not None and not value > 0:
            raise ConfigError(f"{flag(name)} must be above 0")
    count = default if args.seeds is None else args.seeds
    if count < 1:
        raise ConfigError("--seeds must be at least 1")
    return list(range(args.seed, args.seed + count))


def numbers(text: str, name: str, *, whole: bool = False) -> list[float]:
    """A comma-separated list."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1.0]
    if any(not 0 < each < math.inf or (whole and each % 1) for each in found) or (text and not found):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{name} {text!r} is not a comma-separated list of {kind} above 0")
    return found


def run_campaign(
    args: argparse.Namespace,
    arms: Sequence[Arm],
    scenarios: Sequence[Scenario],
    *,
    reference: str | None = None,
    about: dict[str, Any] | None = None,
    seeds: Sequence[int] = (),
) -> int:
    """Run what is left, and write the report of all that is there, also when interrupted.

    reference: the arm that others are compared with and that runs twice (default: the first). about: more of the plan.
    """
    from verifypd.bench import report
    from verifypd.bench.campaign import AGAIN, Campaign, Folder, plan_of
    from verifypd.bench.figures import Targets
    from verifypd.bench.play import Limits
    from verifypd.bench.provenance import provenance
    from verifypd.progress import Rows

    seeds = seeds or chosen_seeds(args)
    targets = Targets(*(each / 1e3 for each in (TARGET_MS | own_targets(args)).values()))
    reference = args.reference or reference or arms[0].name
    control = None if args.no_control else reference
    if reference not in [arm.name for arm in arms]:
        raise ConfigError(f"--reference {reference!r} is none of the arms {', '.join(arm.name for arm in arms)}")
    if all(workload.clients for each in scenarios for workload in each.workloads):
        refuse_given(args, ["max_concurrent"], "a closed loop has as many requests under way as clients")
    limits = Limits(args.cut_off or GRACE, args.request_timeout, args.max_concurrent)
    folder = Folder(args.out)
    sitting = provenance(command=command_line(sys.argv[1:]))
    campaign = Campaign(folder, arms, scenarios, seeds, limits=limits, files=sitting["files"], control=control)
    left = campaign.left()  # before anything is written: a folder of another run is refused
    if args.plan:
        emit(
            "".join(f"{turn.scenario.name}, seed {seeds[turn.index]}, {turn.label}: {turn.requests}\n" for turn in left)
        )
        return 0
    plan = plan_of(arms, scenarios, seeds, targets, control) | {"reference": reference, **(about or {})}
    writable_folder("--out", args.out)
    folder.begin(plan, sitting if left else None)
    turns = list(campaign.turns())
    if len(left) < len(turns):
        say(f"{args.out}: {len(turns) - len(left)} of {len(turns)} runs are there already")
    totals, waiting = (Counter(turn.label for turn in some) for some in (turns, left))
    labels = [label for arm in arms for label in (arm.name, arm.name + AGAIN) if label in totals]
    runs = totals - waiting
    interrupted = False
    try:
        with Rows({label: totals[label] for label in labels}, runs, unit="runs") as rows:
            asyncio.run(campaign.run(_watch(rows, runs)))
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted; the report is of the runs that ended")
    found = report.write(args.out, pictures=not args.no_png)
    show(args.out, found)
    if interrupted:
        return INTERRUPTED
    for error in campaign.errors:
        say(f"FAILED {error}")
    return 1 if campaign.errors else 0


def _watch(rows: Rows, runs: Counter[str]) -> Watch:
    """Shows how a campaign goes: the bar of each arm moves while its runs go on, and each run that ends has a line.

    runs: how many of each arm have ended.
    """
    from bisect import insort
    from math import isnan

    from verifypd.bench.campaign import Watch
    from verifypd.bench.figures import figures
    from verifypd.metrics.stats import percentile

    class Shown(Watch):
        def begin(self, turn: Turn, done: int, total: int) -> None:
            self.turn = turn
            self.wanted = sum(each.output_tokens for each in turn.workload.arrivals)
            self.tokens = self.past = 0  # of requests that ended: what came, and what was asked for
            self.paces: list[float] = []  # s a token, in order
            rows.move(turn.label, runs[turn.label], turn.scenario.name)

        def call(self, call: Call) -> None:
            self.tokens += call.tokens
            self.past += call.arrival.output_tokens
            if not isnan(pace := call.record().tpot):
                insort(self.paces, pace)

        def tick(self, going: Sequence[Call]) -> None:
            if not going:
                return
            more, label = sum(call.tokens for call in going), self.turn.label
            share = min(0.99, (self.past + more) / self.wanted)
            paces = self.paces + [pace for call in going if not isnan(pace := call.record().tpot)]
            speed = (self.tokens + more) / max(going[0].clock(), 1e-6)
            told = [f"{share:.0%}", f"{speed:.0f} tok/s"]
            told += [f"TPOT p95 {1e3 * percentile(paces, 0.95):.1f} ms"] if paces else []
            rows.move(label, runs[label] + share, f"{', '.join(told)}: {self.turn.scenario.name}")

        def end(self, turn: Turn, cell: Cell) -> None:
            f = figures([cell.outcome])
            speed, pace = f"{f['tok_s']:.1f} tok/s", f"TPOT p95 {f['tpot_ms_p95']:.1f} ms"
            lost = "".join(f", {f[name]} {name}" for name in ("unfinished", "failed") if f[name])
            runs[turn.label] += 1
            rows.say(
                f"{turn.scenario.name}, seed {cell.seed}, {turn.label}: {speed}, TTFT p95 {f['ttft_ms_p95']:.0f} ms,"
                f" {pace}{lost}"
            )
            rows.move(turn.label, runs[turn.label], f"{speed}, {pace}")

        def failed(self, turn: Turn, message: str) -> None:
            rows.say(f"{turn.scenario.name}, {turn.label}: FAILED: {message}")
            rows.move(turn.label, runs[turn.label], "FAILED")

    return Shown()


def show(folder: Path, found: dict[str, Any]) -> None:
    """What the comparisons say, on the terminal."""
    from verifypd.bench.results import NAMES, headlines, itself_line

    lines = [
        f"{scenario}: {NAMES[metric]} of {arm} over {found['reference']} {ratio}\n"
        for scenario, arm, metric, ratio in headlines(found)
    ]
    emit("".join(lines) + itself_line(found) + f"\nreport: {folder / 'report.html'}\n")


def command_line(argv: Sequence[str]) -> str:
    """What was typed, without secrets, and without folders of somebody's machine."""
    from verifypd.bench.provenance import relative

    shown, hide = [], False
    for each in argv:
        name, equals, _ = each.partition("=")
        shown.append("HIDDEN" if hide else f"{name}=HIDDEN" if equals and name in SECRETS else relative(each))
        hide = each in SECRETS
    return shlex.join(["verifypd", *shown])
