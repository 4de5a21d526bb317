"""`verifypd compare`: architectures and servers on the same arrivals, side by side on one page, live."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.cli.campaign import TARGET_MS, command_line
from verifypd.cli.files import writable_folder
from verifypd.cli.flags import ENGINE, Command, Parser, add_engine_flags, engine_settings
from verifypd.cli.records import add_site_flags
from verifypd.cli.terminal import INTERRUPTED, emit, say
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.bench.campaign import Scenario
    from verifypd.watch.load import Load

GRACE = 600.0  # s; a run ends then, whatever became of it


def register(command: Command) -> None:
    """Add the command."""
    parser = command(
        "compare", "race architectures and servers on one page, live", run, "%(prog)s ARM ARM [ARM …] [OPTION …]"
    )
    text = "an architecture (plain, pd, pdv, auto, …; pdv:max_draft=4) to start, or [NAME=]URL of a server that runs"
    parser.add_argument("arms", nargs="+", metavar="ARM", help=text)
    group = parser.add_argument_group("comparison")
    group.add_argument("--out", type=Path, default=Path("comparison"), metavar="DIR", help="(default: comparison)")
    group.add_argument("--together", action="store_true", help="all arms at the same time; by default they take turns")
    group.add_argument("--rate", type=float, default=2.0, metavar="R", help="requests/s (default: 2)")
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="N clients that wait for answers, in place of a rate"
    )
    group.add_argument(
        "--duration", type=float, default=20.0, metavar="S", help="requests arrive for S s (default: 20)"
    )
    group.add_argument("--num-requests", type=int, metavar="N", help="of a run (default: what arrives in --duration)")
    group.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each arm (default: 3)")
    group.add_argument("--source", default="prompts", metavar="NAME", help="as of `verifypd bench serve`")
    group.add_argument("--output-tokens", type=int, metavar="N", help="tokens of every output")
    group.add_argument("--plain-text", action="store_true", help="send conversations as one text, without a template")
    group.add_argument("--no-ignore-eos", action="store_true", help="for servers that refuse ignore_eos")
    group.add_argument("--served-model", metavar="NAME", help="model to ask URLs for (default: the first they list)")
    group.add_argument("--api-key", metavar="KEY", help="sent to every URL as a bearer token")
    group.add_argument("--end", action="store_true", help="end with the report; by default the page stays until Ctrl-C")
    group.add_argument("--control", action="store_true", help="let the page change the load; needs a key")
    text = "opens the page's control of the load (default: $VERIFYPD_ADMIN_KEY)"
    group.add_argument("--control-key", metavar="KEY", help=text)
    group.add_argument(
        "--max-rate", type=float, metavar="R", help="requests/s the page may ask for (default: 4 × --rate)"
    )
    group.add_argument("--burst", default="4x1000", metavar="NxTOKENS", help="long prompts at once (default: 4x1000)")
    add_site_flags(parser, 8002)
    add_engine_flags(parser, without=("arch", "record"))


def run(args: argparse.Namespace) -> int:
    """`verifypd compare`."""
    if len(args.arms) < 2:
        raise ConfigError("give two arms or more, such as: verifypd compare plain auto")
    try:
        from verifypd.watch import arms as arms_of
        from verifypd.watch import compare
        from verifypd.watch.replay import Keeper
        from verifypd.watch.site import Site
    except ModuleNotFoundError as error:
        raise ConfigError(f"compare needs {error.name}: pip install 'verifypd[server]'") from None
    fields = {"temperature": 0.0} if args.no_ignore_eos else None
    arms = arms_of.parse(
        args.arms, engine_settings(args), names(args.parser), args.api_key, model=args.served_model, fields=fields
    )
    campaign = _campaign(args, arms)
    show = compare.make_show(arms, " against ".join(arm.name for arm in arms), args.out)
    if args.control:
        show.key = args.control_key or os.environ.get("VERIFYPD_ADMIN_KEY") or None
        if not show.key:
            raise ConfigError("--control needs a key: give --control-key, or set VERIFYPD_ADMIN_KEY")
        campaign.load, campaign.seconds = _load(args), args.duration
        show.control, show.change = campaign.load.limits(), campaign.load.change
    keeper = Keeper(args.out, compare.about(show))
    stage = compare.Stage(arms, show, keeper, args.together)
    with Site(show, args.host, args.port) as site:
        emit(f"watch it at {site.address}/compare\n")
        try:
            found = asyncio.run(compare.compare(campaign, stage))
        except KeyboardInterrupt:
            say("interrupted; the same command goes on where it ended")
            return INTERRUPTED
        finally:
            keeper.close()
        emit("\n".join([*stage.verdict, f"report: {args.out / 'report.html'}", ""]))
        if not args.end:
            emit("the page stays until Ctrl-C\n")
            threading.Event().wait()
    return 0 if found["complete"] else 1


def names(parser: Parser) -> dict[str, str]:
    """The engine's settings by field: their names in a settings file."""
    found = {setting.dest.removeprefix(ENGINE): name for name, setting in parser.settings.items()}
    return {**found, "arch": "arch"}


def _campaign(args: argparse.Namespace, arms: Any) -> Any:
    """The benchmark that measures it."""
    from verifypd.bench.campaign import Folder, plan_of
    from verifypd.bench.figures import Targets
    from verifypd.bench.play import Limits
    from verifypd.bench.provenance import provenance
    from verifypd.watch.compare import Compared, labelled

    for name in ("rate", "duration", "seeds", "concurrency", "num_requests", "output_tokens"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    seeds = list(range(args.seeds))
    scenarios = [labelled(_scenario(args, seeds), args.together)]
    control = None if args.together else arms[0].name
    targets = Targets(*(getattr(args, f"engine_{name}", default) / 1e3 for name, default in TARGET_MS.items()))
    folder, sitting = Folder(args.out), provenance(command=command_line(sys.argv[1:]))
    limits = Limits(seconds=GRACE)
    campaign = Compared(folder, arms, scenarios, seeds, limits=limits, files=sitting["files"], control=control)
    campaign.left()  # before anything is written: a folder of another run is refused
    writable_folder("--out", args.out)
    folder.begin(plan_of(arms, scenarios, seeds, targets, control), sitting)
    return campaign


def _load(args: argparse.Namespace) -> Load:
    from verifypd.watch.load import Bounds, Load

    if args.concurrency:
        raise ConfigError("--control changes a rate: leave --concurrency out")
    count, _, tokens = args.burst.partition("x")
    if not (count.isdigit() and tokens.isdigit()):
        raise ConfigError(f"--burst {args.burst!r} is not NxTOKENS, such as 4x1000")
    bounds = Bounds(args.max_rate or 4 * args.rate, int(count), int(tokens))
    return Load(args.source, args.rate, bounds, args.output_tokens, args.plain_text)


def _scenario(args: argparse.Namespace, seeds: list[int]) -> Scenario:
    from verifypd.bench.arrivals import Process, make
    from verifypd.bench.campaign import Scenario
    from verifypd.bench.sources import source

    chosen = source(args.source).limited(args.output_tokens)
    process = Process(clients=args.concurrency) if args.concurrency else Process(rate=args.rate)
    count = args.num_requests or (None if process.open else 8 * args.concurrency)
    seconds = args.duration if process.open else None
    workloads = tuple(make(chosen, process, seed, count=count, seconds=seconds) for seed in seeds)
    if args.plain_text:
        workloads = tuple(workload.as_text() for workload in workloads)
    name = f"{chosen.name} {process.name}" if not args.control else f"steered, from {chosen.name} {process.name}"
    return Scenario(name, workloads)
