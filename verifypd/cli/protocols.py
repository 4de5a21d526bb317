"""`verifypd bench sweep, three-way, models, comprehensive`: the original's protocols; `simulate`, `all`, `modes`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifypd.cli import simulated_cluster
from verifypd.cli.campaign import (
    add_run_flags,
    add_target_flags,
    chosen_seeds,
    numbers,
    own_targets,
    run_campaign,
)
from verifypd.cli.flags import Parser, add_engine_flags, engine_settings, refuse_given
from verifypd.cli.terminal import INTERRUPTED, emit, say
from verifypd.config import flag
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    from verifypd.bench.pairs import Pair
    from verifypd.bench.protocols import Mixed, Protocol, Size, Wanted
    from verifypd.bench.tuned import Engines

COMMANDS = {
    "sweep": "protocol A: Poisson arrivals at 0.05 C/s, batch C, 20 new tokens, for each concurrency C",
    "three-way": "protocol B: n requests at once, batch 4, 100 new tokens: baseline, pd and pdv",
    "models": "protocol C: three pairs of models, n requests at a rate, batch 4",
    "comprehensive": "protocol D: 10 requests at C/s, batch 6, 100 new tokens: baseline, pd and pdv",
}
NOT_ARM = (
    "arch", "controller", "batch_size", "max_draft", "verify_batch", "verify_wait_ms", "lane_weights", "workers",
    "queue_factor",
)  # fmt: skip
ONLY = {
    "concurrency": ("sweep",),
    "num_requests": ("three-way",),
    "duration": ("sweep", "mixed"),
    "output_tokens": tuple(COMMANDS),
}  # flags of `bench all` that are meant for some protocols
Sub = Callable[[str, str, Callable[[argparse.Namespace], int], str], Parser]


def register(sub: Sub) -> None:
    """Add the commands."""
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
    simulate.add_argument(
        "--alpha", type=float, default=None, metavar="X", help="chance that a draft token is accepted"
    )
    simulate.add_argument("--rate", metavar="R,R", help="mixed: requests/s (default: 4,8,16); cluster: of all replicas"
                          f" together (default: {simulated_cluster.EACH:g} for each)")  # fmt: skip
    _add_flags(simulate)
    simulated_cluster.add_flags(simulate)
    add_target_flags(simulate)
    add_run_flags(simulate)
    every = sub("all", "all protocols on the built-in pair, or on another, one after the other", run_all,
                "--out DIR [OPTION …]")  # fmt: skip
    every.add_argument("--only", default="sweep,three-way,models,comprehensive,mixed", metavar="NAME[:SEEDS],NAME",
                       help="these, in this order, and over how many seeds if not --seeds")  # fmt: skip
    _add_flags(every)
    add_run_flags(every)
    add_engine_flags(every, without=NOT_ARM)
    modes = sub("modes", "say from what was measured why arms win and lose", run_modes, "DIR")
    modes.add_argument("folder", metavar="DIR", help="what --out was, of `bench all` too")


def _add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("protocol")
    add_pair_flag(group)
    group.add_argument("--arm", action="append", dest="arms", metavar="NAME",
                       help="plain, baseline, pd, pdv, unified, table, threshold, auto, 'pdv whole', 'pdv pipelined',"
                       " 'pdv verify 4', 'pdv batch 32' or 'pdv queue 2'; may be repeated (default: the"
                       " protocol's)")  # fmt: skip
    group.add_argument("--concurrency", metavar="N,N", help="sweep, comprehensive: C of each point; all: the sweep's")
    group.add_argument("--num-requests", metavar="N,N",
                       help="three-way, models: n of each point; all: three-way's; else of every point")  # fmt: skip
    group.add_argument("--source", default="prompts", metavar="NAME",
                       help="prompts of models with real weights, as in bench run (default: prompts)")  # fmt: skip
    group.add_argument("--output-tokens", type=int, metavar="N", help="tokens of every output")
    group.add_argument("--size", choices=("full", "short", "quick"),
                       help="how much of the protocol (default: full on a GPU, else short; or --quick)")  # fmt: skip


def add_pair_flag(parser: argparse._ArgumentGroup | Parser) -> None:
    """--pair."""
    parser.add_argument("--pair", action="append", dest="pairs", metavar="DRAFT:VERIFIER",
                        help="models of `verifypd models`, or built-in; may be repeated (default: the original's on a"
                        " GPU, else the built-in pair). Models that are not here have random weights, unless --hf-token"
                        " is given: it fetches them")  # fmt: skip


def run_protocol(args: argparse.Namespace) -> int:
    """`verifypd bench sweep` and its like."""
    from verifypd.bench.protocols import PROTOCOLS

    chosen, seeds = _wanted(args, PROTOCOLS[args.bench_command], _cuda(args))
    _check_source(args, [chosen])
    return _measure(args, chosen, seeds, _engines(args, [chosen]))


def run_mixed(args: argparse.Namespace) -> int:
    """`verifypd bench mixed --pair`: protocol E, all arms on one engine a pair."""
    chosen, seeds = _wanted_mixed(args, _cuda(args))
    return _measure(args, chosen, seeds, _engines(args, [chosen]))


def _engines(args: argparse.Namespace, chosen: Sequence[Wanted | Mixed], kept: bool = False) -> Engines:
    """Engines that hold every arm of some protocols."""
    from verifypd.bench.protocols import DRAFTS
    from verifypd.bench.tuned import POLICIES, QUEUE, Engines

    shared = {name: value for name, value in engine_settings(args).items() if name not in ("model", "draft")}
    if own := [name for name in NOT_ARM if name in shared]:
        raise ConfigError(f"{flag(own[0])} is an arm's own: choose arms with --arm")
    names = {name for each in chosen for name in _arms(args, each.protocol)}
    deeper = max(POLICIES[name].queue for name in names) / QUEUE
    slots = max(*(ceil(deeper * each.most()) for each in chosen), *(2 * (POLICIES[name].batch or 0) for name in names))
    pairs = {pair.name: pair for each in chosen for pair in each.pairs}
    longest = max(each.longest for each in chosen)
    return Engines(list(pairs.values()), args.out / "models", shared, slots, DRAFTS, longest, kept)


def _measure(args: argparse.Namespace, chosen: Wanted | Mixed, seeds: Sequence[int], engines: Engines) -> int:
    """A protocol on engines in this process."""
    from verifypd.bench.tuned import POLICIES, Tuned

    arms = [Tuned(name, POLICIES[name], engines) for name in _arms(args, chosen.protocol)]
    return _run(args, chosen, arms, seeds, chosen.note)


def _run(args: argparse.Namespace, chosen: Wanted | Mixed, arms: Sequence[Any], seeds: Sequence[int], note: str) -> int:
    protocol = chosen.protocol
    say(f"protocol {protocol.letter}, {protocol.title} ({note})")
    about = {"note": note, "protocol": chosen.about}
    reference = _reference(protocol, [arm.name for arm in arms])
    return run_campaign(args, arms, chosen.scenarios(seeds), reference=reference, about=about, seeds=seeds)


def _reference(protocol: Protocol, names: Sequence[str]) -> str:
    """The protocol's reference, or the first arm where that does not run."""
    return protocol.reference if protocol.reference in names else names[0]


def _wanted(args: argparse.Namespace, protocol: Protocol, cuda: bool) -> tuple[Wanted, list[int]]:
    from verifypd.bench.protocols import wanted

    if args.workload or args.vocab:
        raise ConfigError("a protocol has workloads of its own: leave out --workload and --vocab, or use bench run")
    size = _size(args, cuda)
    by_number = protocol.letter in "BC"
    counts = [int(each) for each in numbers(args.num_requests or "", "--num-requests")]
    levels = [int(each) for each in numbers(args.concurrency or "", "--concurrency")]
    if by_number and levels:
        raise ConfigError(f"bench {protocol.command} has no concurrency: give --num-requests")
    if protocol.letter != "A" or counts:
        refuse_given(args, ["duration"], f"bench {protocol.command} counts its requests here; --cut-off ends a run")
    if not by_number and len(counts) > 1:
        raise ConfigError(f"bench {protocol.command} takes one --num-requests, for every point")
    more = {"count": counts[0] if counts and not by_number else None, "output": args.output_tokens,
            "real_source": args.source}  # fmt: skip
    loads = counts if by_number else levels
    made = wanted(protocol, size, _pairs(args, protocol, cuda), loads, duration=args.duration, **more)
    return made, chosen_seeds(argparse.Namespace(**{**vars(args), "num_requests": None}), size.seeds)


def _check_source(args: argparse.Namespace, chosen: Sequence[Wanted | Mixed]) -> None:
    """Refuse --source where no model has a use for it."""
    if all(pair.dummy for each in chosen for pair in each.pairs):
        refuse_given(args, ["source"], "models of random weights get random prompts")


def _wanted_mixed(args: argparse.Namespace, cuda: bool) -> tuple[Mixed, list[int]]:
    from verifypd.bench.protocols import MIXED, wanted_mixed

    if args.workload or args.vocab:
        raise ConfigError("with --pair the traffic is the protocol's: leave out --workload and --vocab")
    size, rates = _size(args, cuda), numbers(getattr(args, "rate", None) or "", "--rate")
    made = wanted_mixed(size, _pairs(args, MIXED, cuda), rates, args.duration)
    return made, chosen_seeds(argparse.Namespace(**{**vars(args), "num_requests": None}), size.seeds)


def _size(args: argparse.Namespace, cuda: bool) -> Size:
    from verifypd.bench.protocols import SIZES

    if getattr(args, "size", None):
        refuse_given(args, ["quick"], "--size says how much is run")
    wanted = getattr(args, "size", None) or ("quick" if args.quick else "full" if cuda else "short")
    return SIZES[wanted]


def _pairs(args: argparse.Namespace, protocol: Protocol, cuda: bool) -> list[Pair]:
    from verifypd.bench.pairs import fetch, given, pair

    own = engine_settings(args)
    if "model" in own or "draft" in own:
        if args.pairs or "model" not in own:
            raise ConfigError("give --pair, or --model and --draft")
        return [given(own)]
    names = args.pairs or (protocol.pairs if cuda else protocol.own_pairs)
    token = own.get("hf_token")
    made = [pair(text, cuda, fetched=token is not None) for text in names]
    if token is not None and not args.plan:
        fetch(made, token)
    return made


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
    _check_simulated(args)
    from verifypd.bench.pairs import ALPHA, Pair
    from verifypd.bench.protocols import DRAFTS, LLAMA, MIXED, PROTOCOLS
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
    targets = own_targets(args)
    note = f"SIMULATED with the costs of {where}, α = {alpha:g}"

    def arm(name: str) -> Simulated:
        return Simulated(name, POLICIES[name], measured.__getitem__, where, alpha, DRAFTS, targets)

    arms = [arm(name) for name in _arms(args, protocol)]
    mixed = args.protocol == "mixed"
    chosen, seeds = _wanted_mixed(args, True) if mixed else _wanted(args, protocol, cuda=True)
    pairs = tuple(Pair(each.name, each.model, each.draft, dummy=True, simulated=True) for each in chosen.pairs)
    chosen = replace(chosen, pairs=pairs)
    return _run(args, chosen, arms, seeds, f"{note}; {chosen.note}")


def _check_simulated(args: argparse.Namespace) -> None:
    """Refuse what has no meaning on the simulator, or for this protocol."""
    refuse_given(args, simulated_cluster.given_names(args), f"that is for `simulate cluster`, not {args.protocol}")
    refuse_given(
        args, ["max_concurrent", "request_timeout"], "a simulated engine takes requests in, and ends them, alone"
    )
    refuse_given(args, ["source"], "simulated requests have lengths, and no text")
    if args.protocol == "mixed":
        refuse_given(args, ["concurrency", "num_requests", "output_tokens"], "mixed traffic comes at a --rate")
    else:
        refuse_given(args, ["rate"], f"{args.protocol} has loads of its own")


def run_all(args: argparse.Namespace) -> int:
    """`verifypd bench all`: every protocol in a folder of its own, and a page that leads to them."""
    from verifypd.bench.protocols import PROTOCOLS
    from verifypd.bench.report import write_index

    cuda = _cuda(args)
    each = dict(_own(args, part) for part in args.only.split(",") if part.strip())
    for name in each:
        if name not in (*PROTOCOLS, "mixed"):
            raise ConfigError(f"--only {name!r} is none of {', '.join(PROTOCOLS)}, mixed")
    for flags, meant in ONLY.items():
        if not set(meant) & set(each):
            refuse_given(args, [flags], f"that is for {' and '.join(meant)}")
    chosen = {name: _wanted_mixed(own, cuda) if name == "mixed" else _wanted(own, PROTOCOLS[name], cuda)
              for name, own in each.items()}  # fmt: skip
    _check_source(args, [wanted for name, (wanted, _) in chosen.items() if name != "mixed"])
    engines = _engines(args, [wanted for wanted, _ in chosen.values()], kept=True)
    codes = []
    try:
        for name, (wanted, seeds) in chosen.items():
            codes.append(_measure(each[name], wanted, seeds, engines))
            if codes[-1] == INTERRUPTED:
                break
    finally:
        asyncio.run(engines.close())
        written = [args.out / name for name in each if (args.out / name / "results.json").exists()]
        if not args.plan:
            emit(f"all reports: {write_index(args.out, written)}\n")
    return max(codes, default=0)


def _own(args: argparse.Namespace, part: str) -> tuple[str, argparse.Namespace]:
    """The name and flags of one protocol of all: a folder and seeds of its own, and loads that are meant for it."""
    name, _, seeds = part.strip().partition(":")
    own = copy(args)
    own.seeds = int(numbers(seeds, "--only, seeds")[0]) if seeds else args.seeds
    own.out = args.out / name
    for flags, meant in ONLY.items():
        setattr(own, flags, getattr(args, flags) if name in meant else None)
    return name, own


def run_modes(args: argparse.Namespace) -> int:
    """`verifypd bench modes`."""
    from verifypd.bench import modes, report

    folder = Path(args.folder)
    for part in report.parts_of(folder):
        emit((f"{part}\n\n" if part != folder else "") + modes.write(part))
    return 0
