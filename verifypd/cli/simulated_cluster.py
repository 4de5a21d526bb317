"""`verifypd bench simulate cluster`: replicas behind one address on the simulator, to thousands of them."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.cli.campaign import TARGET_MS, chosen_seeds, command_line, numbers, own_targets
from verifypd.cli.deploy import CLUSTER, add_cluster_flags
from verifypd.cli.files import writable_folder
from verifypd.cli.flags import Parser, refuse_given
from verifypd.cli.terminal import emit, say
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.bench.cluster import Traffic
    from verifypd.cluster.simulated_replica import World
    from verifypd.simulate.pace import Pace

EACH = 12.0  # requests/s for each replica
SECONDS, QUICK_SECONDS = 60.0, 10.0
BATCH = 64
OWN = (
    "replicas", "routing", "rate_each", "pace", "batch_size", "cache_tokens", "shared", "texts", "text_tokens", "surge",
    "fail_every", "fail_at", "notice", "start", "ingress_ms", "line_ms",
)  # fmt: skip
LEARNT = ("gpu", "costs", "alpha", "arms", "pairs", "batch_size")  # what a pace comes from
IDLE = (
    "concurrency", "num_requests", "source", "output_tokens", "size", "cut_off", "max_concurrent", "request_timeout",
    "workload", "vocab", "reference",
)  # of protocols and campaigns  # fmt: skip
NOT_HERE = ("replicas", "routing", "health_period", "cpus_per_replica", "gpus_per_replica")


def add_flags(parser: Parser) -> None:
    """Flags of a cluster and its traffic."""
    group = parser.add_argument_group("simulated cluster")
    add = group.add_argument
    add("--replicas", default="2", metavar="N,N", help="engines, one run each (default: 2)")
    add("--routing", default="prefix", metavar="NAME,NAME",
        help="prefix, load or round-robin, one run each (default: prefix)")  # fmt: skip
    add("--rate-each", metavar="R,R", help=f"requests/s for each replica, in place of --rate (default: {EACH:g})")
    add("--pace", type=Path, metavar="FILE",
        help="results.json of another run, whose replicas these are like: nothing is learnt anew")  # fmt: skip
    add("--batch-size", type=int, default=BATCH, metavar="N", help=f"requests that decode at once (default: {BATCH})")
    add("--cache-tokens", type=int, default=200_000, metavar="N", help="KV memory of a replica (default: 200000)")
    add("--shared", type=float, default=0.5, metavar="X",
        help="share of the prompts that begin with one of --texts texts (default: 0.5)")  # fmt: skip
    add("--texts", default=1000, metavar="N", type=int, help="texts that prompts begin with (default: 1000)")
    add("--text-tokens", default=1000, metavar="N", type=int, help="of each (default: 1000)")
    add("--surge", type=float, default=1.0, metavar="X",
        help="the rate is X times as high in the middle third (default: 1)")  # fmt: skip
    add("--fail-every", type=float, metavar="S", help="mean s between two deaths of replicas (default: none dies)")
    add("--fail-at", type=float, metavar="S", help="one replica dies then")
    add("--notice", type=float, default=1.0, metavar="S",
        help="s until calls of a dead replica are sent again (default: 1)")  # fmt: skip
    add("--start", type=float, default=60.0, metavar="S", help="s that a new replica takes (default: 60)")
    add("--ingress-ms", type=float, default=10.0, metavar="MS",
        help="from a request's arrival until a replica has it (default: 10)")  # fmt: skip
    add("--line-ms", type=float, default=1.0, metavar="MS",
        help="from the end of a step until the client has its tokens (default: 1)")  # fmt: skip
    add_cluster_flags(parser, without=NOT_HERE)


def given_names(args: argparse.Namespace) -> list[str]:
    """Flags of a cluster alone, as they are in the namespace."""
    return [*OWN, *(name for name in vars(args) if name.startswith(CLUSTER))]


def run(args: argparse.Namespace) -> int:
    """Every size with every routing at every rate, with every seed."""
    from verifypd.bench import cluster
    from verifypd.bench.campaign import write_whole
    from verifypd.bench.provenance import provenance
    from verifypd.cluster.config import ClusterConfig

    _check(args)
    sizes = [int(each) for each in numbers(args.replicas, "--replicas")]
    routings = [each.strip() for each in args.routing.split(",")]
    rates = numbers(args.rate or "", "--rate")
    each = numbers(args.rate_each or str(EACH), "--rate-each")
    given = {name.removeprefix(CLUSTER): value for name, value in vars(args).items() if name.startswith(CLUSTER)}
    seeds = chosen_seeds(args, 1)
    seconds = args.duration or (QUICK_SECONDS if args.quick else SECONDS)
    traffic = cluster.Traffic(1.0, seconds, args.shared, args.texts, args.text_tokens, args.surge)
    plan = [
        (ClusterConfig(**{**given, "replicas": size, "routing": routing}), rate, seed)
        for size, routing in product(sizes, routings)
        for rate in rates or [every * size for every in each]
        for seed in seeds
    ]
    if args.plan:
        for config, rate, seed in plan:
            say(f"{config.replicas} replicas, {config.routing}, {rate:g}/s for {seconds:g} s, seed {seed}")
        return 0
    writable_folder("--out", args.out)
    pace, note = _read_pace(args.pace) if args.pace else _learn_pace(args, traffic)
    runs: list[dict[str, Any]] = []
    for config, rate, seed in plan:
        world, own = _world(args, pace, seed), replace(traffic, rate=rate, seed=seed)
        begun = time.perf_counter()
        result = cluster.play(config, world, own)
        found = cluster.figures(result, world, own)
        took = time.perf_counter() - begun
        sizes_by_time = [[round(at, 2), number] for at, number in result.sizes if at > 0]
        runs.append(
            {**asdict(config), "rate": rate, "seed": seed, "figures": found, "sizes": sizes_by_time,
             "simulated_in_s": round(took, 1)}
        )  # fmt: skip
        say(
            f"{config.replicas} replicas, {config.routing}, {rate:g}/s: {100 * found['attainment']:.1f} % within both"
            f" targets, TTFT p95 {found['ttft_ms_p95']:.0f} ms, TPOT p95 {found['tpot_ms_p95']:.1f} ms ({took:.0f} s)"
        )
    record = {
        "note": note,
        **provenance(command=command_line(sys.argv[1:])),
        "world": cluster.described(_world(args, pace, 0)),
        "traffic": {name: value for name, value in asdict(traffic).items() if name not in ("rate", "seed")},
        "pace": asdict(pace),
        "runs": runs,
    }
    write_whole(args.out / "results.json", json.dumps(record, ensure_ascii=False) + "\n")
    lines = cluster.markdown(cluster.table(runs))
    write_whole(args.out / "summary.md", f"{note}\n\n{lines}")
    write_whole(args.out / "report.html", cluster.page(record))
    emit(f"{note}\n\n{lines}\nreport: {args.out / 'report.html'}\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    refuse_given(args, IDLE, "replicas have traffic and a report of their own")
    if args.rate:
        refuse_given(args, ["rate_each"], "--rate is of all replicas together")
    if args.pace:
        refuse_given(args, LEARNT, "--pace says how fast replicas are")
    for name in ("cache_tokens", "notice", "start", "ingress_ms", "line_ms"):
        if not getattr(args, name) >= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be below 0")
    for name in ("fail_every", "fail_at"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")


def _read_pace(path: Path) -> tuple[Pace, str]:
    """As another run had it."""
    from verifypd.simulate.pace import unpacked

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return unpacked(found["pace"]), str(found["note"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--pace {path}: give the results.json of a simulated cluster ({error!r})") from None


def _learn_pace(args: argparse.Namespace, traffic: Traffic) -> tuple[Pace, str]:
    """How fast one replica goes, learnt from the simulator of one engine, and whose costs it has."""
    from verifypd.bench import cluster
    from verifypd.bench.pairs import ALPHA
    from verifypd.bench.protocols import DRAFTS, LLAMA
    from verifypd.bench.simulated import Simulated, device_costs, pair_costs, read_costs
    from verifypd.bench.tuned import POLICIES

    alpha = ALPHA if args.alpha is None else args.alpha
    name, *more = args.arms or ["auto"]
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError("--alpha must lie in 0..1")
    if name not in POLICIES or more:
        raise ConfigError(f"replicas have one --arm: one of {', '.join(POLICIES)}")
    pair, *more = args.pairs or [LLAMA]
    if more:
        raise ConfigError("replicas have one --pair")
    costs = read_costs(args.costs) if args.costs else pair_costs(device_costs(args.gpu), pair)
    where = args.costs.name if args.costs else args.gpu
    one = Simulated(name, POLICIES[name], lambda _: costs, where, alpha, DRAFTS)
    each = cluster.QUICK_EACH if args.quick else cluster.EACH
    say(f"learning the pace of one replica ({name}, batch {args.batch_size}) from {each * cluster.PHASES} requests")
    pace = cluster.learn(lambda: one.world(args.batch_size), costs, alpha, traffic, each)
    who = f"{where}, {pair}, {name}, batch {args.batch_size}, α = {alpha:g}"
    return pace, f"SIMULATED replicas with the costs of {who}"


def _world(args: argparse.Namespace, pace: Pace, seed: int) -> World:
    from verifypd.cluster.simulated_replica import World

    targets: dict[str, Any] = TARGET_MS | own_targets(args)
    return World(
        pace, args.cache_tokens, args.ingress_ms / 1e3, args.line_ms / 1e3, args.notice, args.start,
        args.fail_every or math.inf, args.fail_at or math.inf, seed=seed,
        **targets,
    )  # fmt: skip
