"""`verifypd bench`: arms through the same traffic, compared, with a report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifypd.cli import protocols
from verifypd.cli.campaign import TARGET_MS, add_run_flags, add_target_flags, chosen_seeds, numbers, run_campaign, show
from verifypd.cli.files import writable_folder
from verifypd.cli.flags import ENGINE, Command, Parser, add_engine_flags, engine_settings, refuse_given, wide
from verifypd.cli.terminal import emit, say
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.play import Arm
    from verifypd.bench.workload import Workload

OPEN_SECONDS, QUICK_SECONDS = 20.0, 6.0
LEAST_REQUESTS, EACH_CLIENT = 24, 3  # closed loop
QUICK_REQUESTS = 8
QUICK_OUTPUT = 16  # tokens
QUICK_SCALE = 32  # of mixed traffic
HTTP = ("served_model", "api_key", "no_ignore_eos", "fields", "abouts", "server_wait")  # flags of servers


def register(command: Command) -> None:
    """Add the commands."""
    parser = command(
        "bench",
        "measure engines and servers (arms) on the same traffic and compare them",
        _no_command,
        "%(prog)s COMMAND …",
    )
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND", prog="verifypd bench")

    def sub(name: str, text: str, run: Callable[[argparse.Namespace], int], usage: str) -> Parser:
        made: Parser = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False, formatter_class=wide,
            usage=f"%(prog)s {usage}",
        )  # fmt: skip
        made.set_defaults(run=run, parser=made)
        return made

    serve = sub(
        "serve", "drive servers that speak OpenAI's API", run_serve, "[NAME=]URL [[NAME=]URL …] --out DIR [OPTION …]"
    )
    serve.add_argument("urls", nargs="+", metavar="[NAME=]URL", help="for example http://127.0.0.1:8000")
    _add_http_flags(serve)
    serve.add_argument("--note", metavar="TEXT", help="what every table and picture says of these servers")
    add_target_flags(serve)
    _add_traffic_flags(serve)
    add_run_flags(serve)

    inside = sub("run", "compare engines in this process", run_inside, "--arm ARM [--arm ARM …] --out DIR [OPTION …]")
    _add_arm_flag(inside)
    _add_traffic_flags(inside)
    add_run_flags(inside)
    add_engine_flags(inside)

    mixed = sub("mixed", "mixed traffic: chat-like lengths, Poisson arrivals, bursts of long prompts", run_mixed,
                "[[NAME=]URL …] [--arm ARM …] --out DIR [OPTION …]")  # fmt: skip
    mixed.add_argument("urls", nargs="*", metavar="[NAME=]URL", help="servers; without any, engines in this process")
    _add_arm_flag(mixed)
    protocols.add_pair_flag(mixed)
    mixed.add_argument("--rate", metavar="R,R", help="requests/s, one scenario each (default: 4; with --pair 8,16)")
    mixed.add_argument("--num-requests", type=int, metavar="N", help="no more of them")
    mixed.add_argument("--concurrency", help="closed loops of these lengths: `verifypd bench run --source mixed`")
    mixed.add_argument("--scale", type=int, metavar="N", help="divide all lengths by N (default: 1; --quick: 32)")
    _add_http_flags(mixed)
    add_run_flags(mixed)
    add_engine_flags(mixed)

    protocols.register(sub)
    report = sub("report", "write the report of a run again", run_report,
                 "DIR [--reference ARM] [--small FILE]\n       %(prog)s FILE --out DIR")  # fmt: skip
    report.add_argument("folder", type=Path, metavar="DIR|FILE",
                        help="what --out was, of `bench all` too, or what --small wrote")  # fmt: skip
    report.add_argument("--out", type=Path, metavar="DIR", help="of a FILE: the folder of its report")
    report.add_argument("--reference", metavar="ARM", help="compare the others with this arm (default: the run's)")
    report.add_argument("--small", type=Path, metavar="FILE", help="write the results there too, their curves thinned")
    report.add_argument("--no-png", action="store_true", help="no PNGs beside the page, which needs none")


def _add_arm_flag(parser: Parser) -> None:
    parser.add_argument(
        "--arm", action="append", dest="arms", metavar="ARCH[:NAME=VALUE,…]",
        help="an architecture and settings of its own, or transformers[:draft=FOLDER|ngram]; may be repeated"
        " (default: plain and auto)",
    )  # fmt: skip


def _add_http_flags(parser: Parser) -> None:
    group = parser.add_argument_group("servers")
    group.add_argument("--served-model", metavar="NAME", help="model to ask for (default: the first a server lists)")
    group.add_argument("--api-key", metavar="KEY", help="sent to every server as a bearer token")
    group.add_argument("--no-ignore-eos", action="store_true", help="for servers that refuse ignore_eos")
    group.add_argument("--field", action="append", dest="fields", default=[], metavar="[ARM:]NAME=VALUE",
                       help="more of each request's body, for one arm or for all; may be repeated")  # fmt: skip
    group.add_argument("--about", action="append", dest="abouts", default=[], metavar="NAME=TEXT",
                       help="how an arm's server was started, for the report; may be repeated")  # fmt: skip
    group.add_argument("--server-wait", type=float, default=60.0, metavar="S",
                       help="wait so long for a server to take requests (default: 60)")  # fmt: skip


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


def _no_command(_args: argparse.Namespace) -> int:
    raise ConfigError(
        "give a command: verifypd bench serve, run, mixed, sweep, three-way, models,"
        " comprehensive, simulate, all, modes or report"
    )


# -- commands ----------------------------------------------------------------------------------------------------------


def run_serve(args: argparse.Namespace) -> int:
    """`verifypd bench serve`."""
    about = {"note": args.note} if args.note else None  # a run that goes on without it keeps its own
    return run_campaign(args, _endpoints(args), _scenarios(args), about=about)


def run_inside(args: argparse.Namespace) -> int:
    """`verifypd bench run`."""
    return run_campaign(args, _engines(args), _scenarios(args))


def run_mixed(args: argparse.Namespace) -> int:
    """`verifypd bench mixed`."""
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.protocols import MIXED, mixed_note
    from verifypd.bench.workload import mixed

    if args.concurrency:
        raise ConfigError(
            "mixed traffic comes at a rate: give --rate. A closed loop is `bench run --source mixed --concurrency N`"
        )
    if args.urls:
        own = [name for name in vars(args) if name.startswith(ENGINE) and name.removeprefix(ENGINE) not in TARGET_MS]
        refuse_given(args, own, "servers have settings of their own")
    else:
        refuse_given(args, HTTP, "no server is given")
    if args.pairs:
        if args.urls or args.scale or args.num_requests:
            raise ConfigError("with --pair the traffic is the protocol's: leave out URLs, --scale and --num-requests")
        return protocols.run_mixed(args)
    if args.urls and args.arms:
        raise ConfigError("give URLs or --arm: engines in this process would share the machine with the servers")
    seconds = args.duration or (QUICK_SECONDS if args.quick else OPEN_SECONDS)
    files = _from_files(args, ["rate", "scale"])
    scale = args.scale or (QUICK_SCALE if args.quick else 1)
    if scale < 1:
        raise ConfigError("--scale must be at least 1")
    scaled = "" if scale == 1 else f", lengths / {scale}"
    scenarios = files or [
        Scenario(
            f"mixed {rate:g}/s{scaled}",
            tuple(mixed(rate, seconds, seed).scaled(scale, args.num_requests) for seed in chosen_seeds(args)),
            args.cut_off,
        )
        for rate in numbers(args.rate or "4", "--rate")
    ]
    if any(not workload.arrivals for each in scenarios for workload in each.workloads):
        raise ConfigError("no request arrives in that time: raise --duration or --rate")
    note = mixed_note(scale, None if args.workload else seconds)
    about = {"note": note, "protocol": MIXED.packed()}
    return run_campaign(args, _endpoints(args) if args.urls else _engines(args), scenarios, about=about)


def run_report(args: argparse.Namespace) -> int:
    """`verifypd bench report`."""
    from verifypd.bench import report

    if args.folder.is_file():
        if args.out is None or args.reference or args.small:
            raise ConfigError("the report of a FILE takes --out DIR; --reference and --small need the runs' folder")
        writable_folder("--out", args.out)
        show(args.out, report.write_kept(args.folder, args.out, not args.no_png))
        return 0
    if args.out is not None:
        raise ConfigError("--out is for the report of a FILE; that of a folder is written there")
    parts = report.parts_of(args.folder)
    if args.small is not None and parts != [args.folder]:
        raise ConfigError(f"--small is of one run: give one of the folders {', '.join(map(str, parts))}")
    for part in parts:
        show(part, report.write(part, args.reference, not args.no_png))
    if args.small is not None:
        report.write_small(args.folder, args.small)
    if parts != [args.folder]:
        emit(f"all reports: {report.write_index(args.folder, parts)}\n")
    return 0


# -- what is run -------------------------------------------------------------------------------------------------------


def _endpoints(args: argparse.Namespace) -> list[Arm]:
    from verifypd.bench.dummy import parsed
    from verifypd.bench.endpoint import Endpoint

    fields = {"temperature": 0.0} | ({} if args.no_ignore_eos else {"ignore_eos": True})
    made = []
    for text in args.urls:
        name, _, url = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
        made.append(
            Endpoint(
                url, name=name or None, model=args.served_model, key=args.api_key, vocab=args.vocab,
                fields=dict(fields), patience=args.server_wait,
            )
        )  # fmt: skip
    for text in args.fields:
        pair, equals, value = text.partition("=")
        arm, _, name = pair.rpartition(":")
        meant = [each for each in made if arm in ("", each.name)]
        if not (name and equals and meant):
            names = ", ".join(each.name for each in made)
            raise ConfigError(f"--field {text}: give NAME=VALUE or ARM:NAME=VALUE with an arm of {names}")
        for each in meant:
            each.fields |= parsed([f"{name}={value}"])
    for text in args.abouts:
        name, _, launch = text.partition("=")
        arm = next((each for each in made if each.name == name), None)
        if arm is None or not launch:
            names = ", ".join(each.name for each in made)
            raise ConfigError(f"--about {text}: give NAME=TEXT with an arm of {names}")
        arm.launch = launch
    return list(made)


def _engines(args: argparse.Namespace) -> list[Arm]:
    from verifypd.bench import assisted, inprocess

    shared = engine_settings(args)
    texts = args.arms or ["plain", "auto"]
    if "arch" in shared:
        raise ConfigError("--arch is an arm's own: give --arm ARCH")
    kinds = [assisted if text.partition(":")[0] == assisted.NAME else inprocess for text in texts]
    return [kind.parse(text, shared, args.vocab) for kind, text in zip(kinds, texts, strict=True)]


def _scenarios(args: argparse.Namespace) -> list[Scenario]:
    """One for each concurrency and each rate, or those of files."""
    from verifypd.bench.arrivals import Process, make
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.sources import source

    if found := _from_files(args, ["source", "concurrency", "rate", "cv", "at_once", "output_tokens"]):
        return found
    if not args.rate:
        refuse_given(args, ["cv"], "an open loop has a --rate")
    chosen = source(args.source).limited(args.output_tokens or (QUICK_OUTPUT if args.quick else None))
    if skipped := chosen.about.get("skipped"):
        reasons = ", ".join(f"{count} × {reason}" for reason, count in skipped.items())
        say(f"{chosen.name}: {sum(skipped.values())} of {chosen.about['records']} records left out: {reasons}")
    rates = numbers(args.rate, "--rate") if args.rate else []
    wanted = args.concurrency or ("" if rates or args.at_once else ("1,4" if args.quick else "1,8"))
    processes = [Process(clients=int(each)) for each in numbers(wanted, "--concurrency", whole=True)]
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
        workloads = [make(chosen, process, seed, count=count, seconds=seconds) for seed in chosen_seeds(args)]
        if args.plain_text:
            workloads = [workload.as_text() for workload in workloads]
        cut = args.cut_off or (None if process.open else args.duration)
        made.append(Scenario(f"{chosen.name} {process.name}", tuple(workloads), cut))
    return made


def _from_files(args: argparse.Namespace, traffic: Sequence[str]) -> list[Scenario]:
    """Workloads as they were written: the same for every seed, but for their random tokens. traffic: flags of those
    that are made."""
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.workload import read

    def seeded(workload: Workload) -> Scenario:
        played = workload.as_text() if getattr(args, "plain_text", False) else workload
        return Scenario(workload.name, (played,) * len(chosen_seeds(args)), args.cut_off or args.duration)

    if args.workload:
        refuse_given(args, [*traffic, "num_requests", "quick"], "a --workload is played as it was written")
    return [seeded(read(path)) for path in args.workload or ()]
