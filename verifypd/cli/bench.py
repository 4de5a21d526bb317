"""`verifypd bench`: arms through the same traffic, compared, with a report."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.cli.flags import Command, Parser, add_engine_flags, engine_settings, wide
from verifypd.cli.terminal import INTERRUPTED, emit, say
from verifypd.config import flag
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.play import Arm
    from verifypd.bench.workload import Workload

SECRETS = ("--api-key", "--hf-token", "--control-key")
TARGET_MS = {"slo_ttft": 500.0, "slo_tpot": 15.0}
SEEDS = 3
OPEN_SECONDS, QUICK_SECONDS = 20.0, 6.0
LEAST_REQUESTS, EACH_CLIENT = 24, 3  # closed loop
QUICK_REQUESTS = 8
QUICK_OUTPUT = 16  # tokens
QUICK_SCALE = 32  # of mixed traffic
GRACE = 600.0  # s; a run ends then, whatever became of it


def register(command: Command) -> None:
    """Add the commands."""
    parser = command("bench", "measure arms on the same traffic and compare them", _no_command, "%(prog)s COMMAND …")
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND", prog="verifypd bench")

    def sub(name: str, text: str, run: Callable[[argparse.Namespace], int], usage: str) -> Parser:
        made: Parser = commands.add_parser(
            name, help=text, description=text.capitalize() + ".", allow_abbrev=False, formatter_class=wide,
            usage=f"%(prog)s {usage}",
        )  # fmt: skip
        made.set_defaults(run=run, parser=made)
        return made

    serve = sub(
        "serve", "drive servers that speak OpenAI's API", run_serve, "[NAME=]URL [[NAME=]URL …] --out DIR [OPTION …]"
    )
    serve.add_argument("urls", nargs="+", metavar="[NAME=]URL", help="for example http://127.0.0.1:8000")
    _add_http_flags(serve)
    _add_target_flags(serve)
    _add_traffic_flags(serve)
    _add_run_flags(serve)

    inside = sub("run", "compare engines in this process", run_inside, "--arm ARM [--arm ARM …] --out DIR [OPTION …]")
    _add_arm_flag(inside)
    _add_traffic_flags(inside)
    _add_run_flags(inside)
    add_engine_flags(inside)

    mixed = sub("mixed", "mixed traffic: chat-like lengths, Poisson arrivals, bursts of long prompts", run_mixed,
                "[[NAME=]URL …] [--arm ARM …] --out DIR [OPTION …]")  # fmt: skip
    mixed.add_argument("urls", nargs="*", metavar="[NAME=]URL", help="servers; without any, engines in this process")
    _add_arm_flag(mixed)
    mixed.add_argument("--rate", default="4", metavar="R,R", help="requests/s, one scenario each (default: 4)")
    mixed.add_argument("--scale", type=int, metavar="N", help="divide all lengths by N (default: 1; --quick: 32)")
    _add_http_flags(mixed)
    _add_run_flags(mixed)
    add_engine_flags(mixed)

    report = sub("report", "write the report of a run again", run_report, "DIR [--reference ARM]")
    report.add_argument("folder", metavar="DIR", help="what --out was")
    report.add_argument("--reference", metavar="ARM", help="compare the others with this arm (default: the first)")


def _add_arm_flag(parser: Parser) -> None:
    parser.add_argument(
        "--arm", action="append", dest="arms", metavar="ARCH[:NAME=VALUE,…]",
        help="an architecture and settings of its own; may be repeated (default: plain and auto)",
    )  # fmt: skip


def _add_http_flags(parser: Parser) -> None:
    group = parser.add_argument_group("servers")
    group.add_argument("--served-model", metavar="NAME", help="model to ask for (default: the first a server lists)")
    group.add_argument("--api-key", metavar="KEY", help="sent to every server as a bearer token")
    group.add_argument("--no-ignore-eos", action="store_true", help="for servers that refuse ignore_eos")
    group.add_argument("--server-wait", type=float, default=60.0, metavar="S",
                       help="wait so long for a server to answer (default: 60)")  # fmt: skip


def _add_target_flags(parser: Parser) -> None:
    for name, text in (("ttft", "the first token"), ("tpot", "each token after it")):
        default = TARGET_MS[f"slo_{name}"]
        parser.add_argument(
            f"--slo-{name}", type=float, dest=f"engine_slo_{name}", default=argparse.SUPPRESS, metavar="MS",
            help=f"target for {text}, ms (default: {default:g})",
        )  # fmt: skip


def _add_traffic_flags(parser: Parser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--source", default="prompts", metavar="NAME",
        help="prompts[:FILE] (built-in or JSON lines), sharegpt[:FILE], fixed:PROMPTxOUTPUT, chat, mixed, repetition",
    )  # fmt: skip
    group.add_argument("--concurrency", metavar="N,N", help="closed loop: clients, one scenario each (default: 1,8)")
    group.add_argument("--rate", metavar="R,R", help="open loop: requests/s, one scenario each")
    group.add_argument("--cv", type=float, default=1.0, metavar="X",
                       help="open loop: spread of the time between arrivals; 1 is Poisson, more is bursty")  # fmt: skip
    group.add_argument("--at-once", action="store_true", help="all requests at the start")
    group.add_argument("--num-requests", type=int, metavar="N", help="requests of a run")
    group.add_argument("--output-tokens", type=int, metavar="N", help="tokens of every output")
    group.add_argument("--plain-text", action="store_true", help="send conversations as one text, without a template")


def _add_run_flags(parser: Parser) -> None:
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
        "--request-timeout", type=float, default=300.0, metavar="S", help="stop a request after S seconds"
    )
    group.add_argument(
        "--workload", action="append", type=Path, metavar="FILE",
        help="play this workload (DIR/workloads has some) in place of generated ones; may be repeated",
    )  # fmt: skip
    group.add_argument("--vocab", type=int, metavar="N", help="send random prompts as token ids below N, not as words")
    group.add_argument("--reference", metavar="ARM", help="compare the others with this arm (default: the first)")
    group.add_argument("--no-control", action="store_true", help="do not run the first arm twice")
    group.add_argument("--no-png", action="store_true", help="no PNGs beside the page, which needs none")


def _no_command(_args: argparse.Namespace) -> int:
    raise ConfigError("give a command: verifypd bench serve, run, mixed or report")


# -- commands ----------------------------------------------------------------------------------------------------------


def run_serve(args: argparse.Namespace) -> int:
    """`verifypd bench serve`."""
    return _campaign(args, _endpoints(args), _scenarios(args))


def run_inside(args: argparse.Namespace) -> int:
    """`verifypd bench run`."""
    return _campaign(args, _engines(args), _scenarios(args))


def run_mixed(args: argparse.Namespace) -> int:
    """`verifypd bench mixed`."""
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.workload import mixed

    if args.urls and args.arms:
        raise ConfigError("give URLs or --arm: engines in this process would share the machine with the servers")
    seconds = args.duration or (QUICK_SECONDS if args.quick else OPEN_SECONDS)
    scale = args.scale or (QUICK_SCALE if args.quick else 1)
    if scale < 1:
        raise ConfigError("--scale must be at least 1")
    scaled = "" if scale == 1 else f", lengths / {scale}"
    scenarios = _from_files(args) or [
        Scenario(
            f"mixed {rate:g}/s{scaled}",
            tuple(mixed(rate, seconds, seed).scaled(scale) for seed in _seeds(args)),
            args.cut_off,
        )
        for rate in _numbers(args.rate, "--rate")
    ]
    if any(not workload.arrivals for each in scenarios for workload in each.workloads):
        raise ConfigError("no request arrives in that time: raise --duration or --rate")
    return _campaign(args, _endpoints(args) if args.urls else _engines(args), scenarios)


def run_report(args: argparse.Namespace) -> int:
    """`verifypd bench report`."""
    from verifypd.bench import report

    found = report.write(Path(args.folder), args.reference)
    _done(Path(args.folder), found)
    return 0


# -- what is run -------------------------------------------------------------------------------------------------------


def _seeds(args: argparse.Namespace) -> list[int]:
    for name in ("duration", "cut_off", "request_timeout", "max_concurrent", "num_requests", "vocab"):
        value = getattr(args, name, None)
        if value is not None and not value > 0:
            raise ConfigError(f"{flag(name)} must be above 0")
    count = SEEDS if args.seeds is None else args.seeds
    if count < 1:
        raise ConfigError("--seeds must be at least 1")
    return list(range(args.seed, args.seed + count))


def _endpoints(args: argparse.Namespace) -> list[Arm]:
    from verifypd.bench.endpoint import Endpoint

    fields = {"temperature": 0.0} if args.no_ignore_eos else None
    made: list[Arm] = []
    for text in args.urls:
        name, _, url = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
        made.append(
            Endpoint(
                url, name=name or None, model=args.served_model, key=args.api_key, vocab=args.vocab, fields=fields,
                patience=args.server_wait,
            )
        )  # fmt: skip
    return made


def _engines(args: argparse.Namespace) -> list[Arm]:
    from verifypd.bench.inprocess import parse

    shared = engine_settings(args)
    texts = args.arms or ["plain", "auto"]
    if "arch" in shared:
        raise ConfigError("--arch is an arm's own: give --arm ARCH")
    return [parse(text, shared, args.vocab) for text in texts]


def _scenarios(args: argparse.Namespace) -> list[Scenario]:
    """One for each concurrency and each rate, or those of files."""
    from verifypd.bench.arrivals import Process, make
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.sources import source

    if found := _from_files(args):
        return found
    chosen = source(args.source).limited(args.output_tokens or (QUICK_OUTPUT if args.quick else None))
    if skipped := chosen.about.get("skipped"):
        reasons = ", ".join(f"{count} × {reason}" for reason, count in skipped.items())
        say(f"{chosen.name}: {sum(skipped.values())} of {chosen.about['records']} records left out: {reasons}")
    rates = _numbers(args.rate, "--rate") if args.rate else []
    wanted = args.concurrency or ("" if rates or args.at_once else ("1,4" if args.quick else "1,8"))
    processes = [Process(clients=int(each)) for each in _numbers(wanted, "--concurrency")]
    processes += [Process(rate=rate, cv=args.cv) for rate in rates] + ([Process()] if args.at_once else [])
    made = []
    for process in processes:
        seconds = args.duration
        count = args.num_requests
        if process.open and count is None:
            seconds = seconds or (QUICK_SECONDS if args.quick else OPEN_SECONDS)
        elif count is None:
            least, each = (QUICK_REQUESTS, 2) if args.quick else (LEAST_REQUESTS, EACH_CLIENT)
            count = max(least, each * (process.clients or 0))
        workloads = [make(chosen, process, seed, count=count, seconds=seconds) for seed in _seeds(args)]
        if args.plain_text:
            workloads = [workload.as_text() for workload in workloads]
        cut = args.cut_off or (None if process.open else args.duration)
        made.append(Scenario(f"{chosen.name} {process.name}", tuple(workloads), cut))
    return made


def _from_files(args: argparse.Namespace) -> list[Scenario]:
    """Workloads as they were written: the same for every seed, but for their random tokens."""
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.workload import read

    def seeded(workload: Workload) -> Scenario:
        return Scenario(workload.name, (workload,) * len(_seeds(args)), args.cut_off)

    return [seeded(read(path)) for path in args.workload or ()]


def _numbers(text: str, name: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1.0]
    if any(not each > 0 for each in found):
        raise ConfigError(f"{name} {text!r} is not a comma-separated list of numbers above 0")
    return found


# -- running it --------------------------------------------------------------------------------------------------------


def _campaign(args: argparse.Namespace, arms: Sequence[Arm], scenarios: Sequence[Scenario]) -> int:
    """Run what is left, and write the report of all that is there, also when interrupted."""
    from verifypd.bench import report
    from verifypd.bench.campaign import Campaign, Folder, plan_of
    from verifypd.bench.figures import Targets
    from verifypd.bench.play import Limits
    from verifypd.bench.provenance import provenance

    seeds = _seeds(args)
    targets = Targets(*(getattr(args, f"engine_{name}", default) / 1e3 for name, default in TARGET_MS.items()))
    control = None if args.no_control else arms[0].name
    if args.reference is not None and args.reference not in [arm.name for arm in arms]:
        raise ConfigError(f"--reference {args.reference!r} is none of the arms {', '.join(arm.name for arm in arms)}")
    limits = Limits(args.cut_off or GRACE, args.request_timeout, args.max_concurrent)
    folder = Folder(args.out)
    sitting = provenance(command=command_line(sys.argv[1:]))
    campaign = Campaign(folder, arms, scenarios, seeds, limits=limits, files=sitting["files"], control=control)
    left = campaign.left()  # before anything is written: a folder of another run is refused
    folder.begin(plan_of(arms, scenarios, seeds, targets, control), sitting)
    total = sum(1 for _ in campaign.turns())
    if len(left) < total:
        say(f"{args.out}: {total - len(left)} of {total} runs are there already")
    interrupted = False
    try:
        asyncio.run(campaign.run(_watch()))
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted; the report is of the runs that ended")
    found = report.write(args.out, args.reference, not args.no_png)
    _done(args.out, found)
    if interrupted:
        return INTERRUPTED
    for error in campaign.errors:
        say(f"FAILED {error}")
    return 1 if campaign.errors else 0


def _watch() -> Any:
    """Shows how a campaign goes: a bar a run, and a line when it has ended."""
    from verifypd.bench.campaign import Cell, Turn, Watch
    from verifypd.bench.figures import figures
    from verifypd.bench.play import Call
    from verifypd.metrics.stats import percentile
    from verifypd.progress import Bar, bar

    class Shown(Watch):
        def __init__(self) -> None:
            self.bar: Bar | None = None
            self.calls: list[Call] = []

        def begin(self, turn: Turn, done: int, total: int) -> None:
            self.calls = []
            name = f"{done + 1}/{total} {turn.scenario.name}, {turn.label}"
            self.bar = bar(desc=name, total=len(turn.workload.arrivals), unit="request")
            self.bar.__enter__()

        def call(self, call: Call) -> None:
            self.calls.append(call)
            now = max(call.clock(), 1e-6)
            ends = [each.outputs[-1] - each.due for each in self.calls if each.outputs]
            rate = sum(each.tokens for each in self.calls) / now
            if self.bar is not None:
                self.bar.set_postfix_str(f"{rate:.0f} tok/s, E2E p95 {percentile(ends, 0.95) if ends else 0.0:.2f} s")
                self.bar.update(1)

        def end(self, turn: Turn, cell: Cell) -> None:
            self._close()
            f = figures([cell.outcome])
            lost = f", {f['unfinished']} unfinished" * bool(f["unfinished"]) + f", {f['failed']} failed" * bool(
                f["failed"]
            )
            say(
                f"{turn.scenario.name}, seed {cell.seed}, {turn.label}: {f['tok_s']:.1f} tok/s, TTFT p95"
                f" {f['ttft_ms_p95']:.0f} ms, TPOT p95 {f['tpot_ms_p95']:.1f} ms{lost}"
            )

        def failed(self, turn: Turn, message: str) -> None:
            self._close()
            say(f"{turn.scenario.name}, {turn.label}: FAILED: {message}")

        def _close(self) -> None:
            if self.bar is not None:
                self.bar.__exit__(None, None, None)
                self.bar = None

    return Shown()


def _done(folder: Path, found: dict[str, Any]) -> None:
    from verifypd.bench.results import itself_line, ratio

    lines = []
    for scenario, own in found["scenarios"].items():
        for arm, metrics in own["compared"].items():
            shown = "tok_s" if "closed" in scenario else "e2e_ms_mean"  # arrivals set the tokens/s of an open loop
            if shown in metrics:
                what = "tokens/s" if shown == "tok_s" else "mean E2E"
                lines.append(f"{scenario}: {what} of {arm} over {found['reference']} {ratio(metrics[shown])}\n")
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
