"""`verifypd bench sweep, three-way, models, comprehensive`: the original's protocols; `simulate`, `all`, `modes`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.cli import simulated_cluster
from verifypd.cli.campaign import add_run_flags, chosen_seeds, numbers, run_campaign
from verifypd.cli.flags import Parser, add_engine_flags, engine_settings
from verifypd.cli.terminal import INTERRUPTED, emit, say
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.bench.pairs import Pair
    from verifypd.bench.protocols import Protocol, Size, Wanted

COMMANDS = {
    "sweep": "protocol A: Poisson arrivals at 0.05 C/s, batch C, 20 new tokens, for each concurrency C",
    "three-way": "protocol B: n requests at once, batch 4, 100 new tokens: baseline, pd and pdv",
    "models": "protocol C: three pairs of models, n requests at a rate, batch 4",
    "comprehensive": "protocol D: 10 requests at C/s, batch 6, 100 new tokens: baseline, pd and pdv",
}
NOT_ARM = ("arch", "controller", "batch_size", "max_draft", "verify_batch", "workers", "queue_factor")
Sub = Callable[[str, str, Callable[[argparse.Namespace], int], str], Parser]


def register(sub: Sub, run_mixed: Callable[[argparse.Namespace], int]) -> None:
    """Add the commands. run_mixed: protocol E, which has a command of its own."""
    for name, text in COMMANDS.items():
        parser = sub(name, text, run_protocol, "--out DIR [OPTION …]")
        _add_flags(parser)
        add_run_flags(parser)
        add_engine_flags(parser, without=NOT_ARM)
    simulate = sub(
        "simulate", "a protocol on the simulator: another GPU, more requests than this machine holds", run_simulated,
        "PROTOCOL --gpu NAME --out DIR [OPTION …]",
    )  # fmt: skip
    simulate.add_argument("protocol", choices=[*COMMANDS, "mixed", "cluster"], help="what is simulated")
    where = simulate.add_mutually_exclusive_group()
    where.add_argument("--gpu", default="h200", metavar="NAME",
                       help="costs: h200 (measured), or h100, a100, l40s, rtx4090 (scaled from it)")  # fmt: skip
    where.add_argument("--costs", type=Path, metavar="FILE", help="costs: what `verifypd costs --json` wrote")
    simulate.add_argument("--alpha", type=float, default=None, metavar="X", help="chance that a draft token stands")
    simulate.add_argument("--rate", metavar="R,R", help="mixed: requests/s (default: 4,8,16); cluster: of all replicas"
                          f" together (default: {simulated_cluster.EACH:g} for each)")  # fmt: skip
    _add_flags(simulate)
    simulated_cluster.add_flags(simulate)
    add_run_flags(simulate)
    every = sub("all", "all protocols on the built-in pair, or on another, one after the other", run_all,
                "--out DIR [OPTION …]")  # fmt: skip
    every.set_defaults(run_mixed=run_mixed)
    every.add_argument("--only", default="sweep,three-way,models,comprehensive,mixed", metavar="NAME,NAME",
                       help="leave out the others")  # fmt: skip
    _add_flags(every)
    add_run_flags(every)
    add_engine_flags(every, without=NOT_ARM)
    modes = sub("modes", "say from what was measured why arms win and lose", run_modes, "DIR")
    modes.add_argument("folder", metavar="DIR", help="what --out was")


def _add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("protocol")
    group.add_argument("--pair", action="append", dest="pairs", metavar="DRAFT:VERIFIER",
                       help="models of `verifypd models`, or built-in; may be repeated (default: the original's on a"
                       " GPU, else the built-in pair)")  # fmt: skip
    group.add_argument("--arm", action="append", dest="arms", metavar="NAME",
                       help="baseline, plain, pd, pdv, 'pdv whole', 'pdv pipelined', 'pdv batch 32' or auto; may be"
                       " repeated (default: the protocol's)")  # fmt: skip
    group.add_argument("--concurrency", metavar="N,N", help="sweep, comprehensive: C of each point")
    group.add_argument("--num-requests", metavar="N,N", help="three-way, models: n of each point; else of every point")
    group.add_argument("--source", default="prompts", metavar="NAME",
                       help="prompts of models with real weights, as in bench run (default: prompts)")  # fmt: skip
    group.add_argument("--output-tokens", type=int, metavar="N", help="tokens of every output")
    group.add_argument("--size", choices=("full", "short", "quick"),
                       help="how much of the protocol (default: full on a GPU, else short; or --quick)")  # fmt: skip


def run_protocol(args: argparse.Namespace) -> int:
    """`verifypd bench sweep` and its like."""
    from verifypd.bench.protocols import PROTOCOLS

    return _measure(args, PROTOCOLS[args.bench_command])


def _measure(args: argparse.Namespace, protocol: Protocol) -> int:
    """A protocol on engines in this process."""
    from verifypd.bench.protocols import DRAFTS
    from verifypd.bench.tuned import POLICIES, Engines, Tuned

    chosen, seeds = _wanted(args, protocol, _cuda(args))
    shared = {name: value for name, value in engine_settings(args).items() if name not in ("model", "draft")}
    names = _arms(args, protocol)
    slots = max(chosen.most(), *(2 * (POLICIES[name].batch or 0) for name in names))
    engines = Engines(list(chosen.pairs), args.out / "models", shared, slots, DRAFTS)
    arms = [Tuned(name, POLICIES[name], engines) for name in names]
    return _run(args, chosen, arms, seeds, chosen.note)


def _run(args: argparse.Namespace, chosen: Wanted, arms: Sequence[Any], seeds: Sequence[int], note: str) -> int:
    protocol = chosen.protocol
    names = [arm.name for arm in arms]
    about = {
        "note": note,
        "protocol": protocol.packed() | {"size": chosen.size.name, "output_tokens": chosen.tokens},
    }  # fmt: skip
    say(f"protocol {protocol.letter}, {protocol.title} ({note})")
    return run_campaign(
        args, arms, chosen.scenarios(seeds), reference=_reference(protocol, names), about=about, seeds=seeds
    )


def _reference(protocol: Protocol, names: Sequence[str]) -> str:
    """The protocol's reference, or the first arm where that does not run."""
    return protocol.reference if protocol.reference in names else names[0]


def _wanted(args: argparse.Namespace, protocol: Protocol, cuda: bool) -> tuple[Wanted, list[int]]:
    from verifypd.bench.protocols import SIZES, wanted

    if args.workload or args.vocab:
        raise ConfigError("a protocol has workloads of its own: leave out --workload and --vocab, or use bench run")
    size: Size = SIZES[args.size or ("quick" if args.quick else "full" if cuda else "short")]
    by_number = protocol.letter in "BC"
    counts = [int(each) for each in numbers(args.num_requests or "", "--num-requests")]
    levels = [int(each) for each in numbers(args.concurrency or "", "--concurrency")]
    if by_number and levels:
        raise ConfigError(f"bench {protocol.command} has no concurrency: give --num-requests")
    if not by_number and len(counts) > 1:
        raise ConfigError(f"bench {protocol.command} takes one --num-requests, for every point")
    more = {"count": counts[0] if counts and not by_number else None, "output": args.output_tokens,
            "real_source": args.source}  # fmt: skip
    loads = counts if by_number else levels
    made = wanted(protocol, size, _pairs(args, protocol, cuda), loads, duration=args.duration, **more)
    return made, chosen_seeds(argparse.Namespace(**{**vars(args), "num_requests": None}), size.seeds)


def _pairs(args: argparse.Namespace, protocol: Protocol, cuda: bool) -> list[Pair]:
    from verifypd.bench.pairs import given, pair

    own = engine_settings(args)
    if "model" in own or "draft" in own:
        if args.pairs or "model" not in own:
            raise ConfigError("give --pair, or --model and --draft")
        return [given(own)]
    return [pair(text, cuda) for text in args.pairs or (protocol.pairs if cuda else protocol.own_pairs)]


def _arms(args: argparse.Namespace, protocol: Protocol) -> list[str]:
    from verifypd.bench.tuned import POLICIES

    names = args.arms or list(protocol.arms)
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--arm {name!r} is none of {', '.join(POLICIES)}")
    return names


def _cuda(args: argparse.Namespace) -> bool:
    import torch

    return torch.cuda.is_available() and not str(getattr(args, "engine_device", "auto")).startswith("cpu")


def run_simulated(args: argparse.Namespace) -> int:
    """`verifypd bench simulate`."""
    if args.protocol == "cluster":
        return simulated_cluster.run(args)
    from verifypd.bench.pairs import ALPHA, Pair
    from verifypd.bench.protocols import DRAFTS, LLAMA, MIXED, PROTOCOLS, mixed_scenarios
    from verifypd.bench.simulated import Simulated, device_costs, pair_costs, read_costs
    from verifypd.bench.tuned import POLICIES

    alpha = ALPHA if args.alpha is None else args.alpha
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError("--alpha must lie in 0..1")
    protocol = MIXED if args.protocol == "mixed" else PROTOCOLS[args.protocol]
    args.pairs = args.pairs or ([LLAMA] if args.costs else list(protocol.pairs))
    where = args.costs.name if args.costs else args.gpu
    base = read_costs(args.costs) if args.costs else device_costs(args.gpu)
    measured = {text: base if args.costs else pair_costs(base, text) for text in args.pairs}
    note = f"SIMULATED with the costs of {where}, α = {alpha:g}"

    def arm(name: str) -> Simulated:
        return Simulated(name, POLICIES[name], measured.__getitem__, where, alpha, DRAFTS)

    arms = [arm(name) for name in _arms(args, protocol)]
    args.size = args.size or ("quick" if args.quick else "full")
    chosen, seeds = _wanted(args, protocol, cuda=True)
    pairs = tuple(Pair(each.name, each.model, each.draft, dummy=True, simulated=True) for each in chosen.pairs)
    chosen = replace(chosen, pairs=pairs)
    if args.protocol != "mixed":
        return _run(args, chosen, arms, seeds, f"{note}; protocol {protocol.letter}; {chosen.size.note}".rstrip("; "))
    rates = numbers(args.rate or "4,8,16", "--rate")
    scenarios = mixed_scenarios(pairs, rates, args.duration or 20.0, seeds)
    about = {"note": note, "protocol": protocol.packed()}
    reference = _reference(protocol, [each.name for each in arms])
    return run_campaign(args, arms, scenarios, reference=reference, about=about, seeds=seeds)


def run_all(args: argparse.Namespace) -> int:
    """`verifypd bench all`: every protocol in a folder of its own, and a page that leads to them."""
    from verifypd.bench.protocols import PROTOCOLS
    from verifypd.bench.report import write_index

    names = [name.strip() for name in args.only.split(",") if name.strip()]
    for name in names:
        if name not in (*PROTOCOLS, "mixed"):
            raise ConfigError(f"--only {name!r} is none of {', '.join(PROTOCOLS)}, mixed")
    codes = []
    try:
        for name in names:
            own = copy(args)
            own.out = args.out / name
            if name == "mixed":
                own.urls, own.arms, own.rate, own.scale, own.num_requests = [], None, "2", None, None
                own.quick, own.seeds = args.quick or not _cuda(args), args.seeds or 2
                codes.append(args.run_mixed(own))
            else:
                codes.append(_measure(own, PROTOCOLS[name]))
            if codes[-1] == INTERRUPTED:
                break
    finally:
        page = write_index(args.out, [args.out / name for name in names if (args.out / name / "results.json").exists()])
        emit(f"all reports: {page}\n")
    return max(codes, default=0)


def run_modes(args: argparse.Namespace) -> int:
    """`verifypd bench modes`."""
    from verifypd.bench import modes

    emit(modes.write(Path(args.folder)))
    return 0
