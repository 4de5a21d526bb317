"""Our engine and vLLM on one GPU, in one run: same arrivals and prompts, seeds pooled, arms in turn, one arm twice.

    python benchmarks/beside_vllm.py --peer DIR --arms ours:plain vllm:plain ours:head vllm:eagle --at-once 2 \\
        --levels 1,8,32,128 --control ours:head --json results/beside.json
    python benchmarks/beside_vllm.py --peer DIR --arms ours:head vllm:eagle --levels "" --rates 8,16,20 --seeds 0,1
    python benchmarks/beside_vllm.py --plan …          # what would be run, and how long it would take
    python benchmarks/beside_vllm.py --tiny --arms ours:plain ours:tiny1b --levels 1,2 --rates 16   # tests this script

Arms are ours:plain (no draft), ours:auto (draft: --draft), ours:head, ours:eagle3, ours:tiny1b, vllm:plain, vllm:eagle
and vllm:tiny1b. Settings may follow: `ours:head:controller=fixed,max_draft=4` (any of the engine's), `vllm:eagle:k=2`
(any argument of vLLM's engine). Every arm is a process of its own with weights of its own, random, in the shape of
--model; one computes at a time. --peer is a folder whose `site/` holds vLLM and what it imports; without it vLLM is
imported from this environment. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from script import command_line, keep

from verifypd.bench.arms import DRAFT_MODEL, Arm, Setup, parse, start_message
from verifypd.bench.beside import CLOSING, Cell, Comparison, Worker, closed_cell, open_cell, table
from verifypd.bench.figures import SLO_TPOT
from verifypd.bench.provenance import provenance
from verifypd.bench.workload import mixed
from verifypd.config import parse_bytes
from verifypd.errors import ConfigError

ARM_BYTES = 21e9  # of one arm besides its KV: weights of a 7B model and a draft, graphs, workspaces, the CUDA context
GPU_SHARE = 0.94  # of the device's memory, for all arms together
H200_BYTES = 150.7e9  # assumed by --plan where there is no GPU
START_SECONDS = {"ours": 40.0, "vllm": 90.0}  # for --plan
PROMPT, OUTPUT, MAX_LEN = 384, 256, 4608  # tokens


def numbers(text: str) -> list[int]:
    """`1,8` -> [1, 8]; empty: none."""
    return [int(part) for part in text.split(",") if part.strip()]


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--arms", nargs="+", required=True, metavar="ENGINE:NAME[:SETTING=VALUE,…]")
    parser.add_argument("--control", metavar="ARM", help="an arm that does everything twice (default: the first)")
    parser.add_argument("--reference", nargs="+", metavar="ARM", help="ratios are over these (default: every vLLM arm)")
    parser.add_argument("--levels", type=numbers, default=[1, 8, 32, 128], help="closed loop: clients")
    parser.add_argument("--rates", type=numbers, default=[], help="mixed traffic: requests/s")
    parser.add_argument(
        "--seeds", type=numbers, default=[0, 1], help="of arrivals and prompts; 0: the files mixed-RATE"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of mixed traffic, for each seed")
    parser.add_argument("--requests", type=int, default=24, help="closed loop: at least, over all seeds")
    parser.add_argument("--each", type=int, default=3, help="closed loop: requests a client and seed, at least")
    parser.add_argument("--model", default="llama-2-7b", help="a built-in shape")
    parser.add_argument("--draft", default=DRAFT_MODEL, help="of ours:auto: a built-in shape, eagle, eagle3 or ngram")
    parser.add_argument("--alpha", type=float, default=0.8, help="chance that a draft token stands")
    parser.add_argument("--batch", type=int, default=128, help="requests in a pass")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="holds site/, vLLM and what it imports")
    parser.add_argument("--at-once", type=int, metavar="N", help="arms loaded at the same time (default: all)")
    parser.add_argument("--one-at-a-time", action="store_const", const=1, dest="at_once", help="as --at-once 1")
    parser.add_argument("--kv-memory", help="of each arm, e.g. 16GB (default: what the GPU has for that many)")
    parser.add_argument("--minutes", type=float, default=9.5, help="nothing is begun that would not end by then")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and run nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: tests this script, means nothing")
    parser.add_argument("--raw", type=Path, help="append every run's single times there, a JSON line each")
    parser.add_argument("--logs", type=Path, help="folder for a log of each arm (default: beside the JSON)")
    args = parser.parse_args(given)
    try:
        args.arms = [parse(text, args.draft) for text in args.arms]
    except ConfigError as error:
        parser.error(str(error))
    names = [arm.name for arm in args.arms]
    args.control = names[0] if args.control is None else args.control
    args.reference = args.reference or [arm.name for arm in args.arms if arm.engine == "vllm"] or names[:1]
    unknown = [name for name in (args.control, *args.reference) if name not in (*names, "none")]
    if unknown:
        parser.error(f"{unknown[0]} is none of the arms {', '.join(names)}")
    if len(set(names)) < len(names):
        parser.error("an arm is named twice; use --control to run one twice")
    if not args.seeds or not (args.levels or args.rates):
        parser.error("give --seeds, and --levels or --rates")
    if max(args.levels, default=0) > args.batch:
        parser.error(f"--levels {max(args.levels)} is more than --batch {args.batch}")
    if args.peer is not None and not (args.peer / "site").is_dir():
        parser.error(f"--peer {args.peer}: there is no folder site/ in it")
    args.at_once = args.at_once or len(args.arms)
    args.parser = parser
    return args


def device_bytes() -> float | None:
    """Memory of the GPU; None where there is none."""
    if shutil.which("nvidia-smi") is not None:
        ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(ask, capture_output=True, text=True).stdout.split()
        if found and found[0].isdigit():
            return float(found[0]) * 2**20
    import torch  # seconds later

    return float(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else None


def kv_bytes(args: argparse.Namespace) -> int:
    """KV memory of one arm."""
    if args.kv_memory is not None:
        return parse_bytes(args.kv_memory, "kv_memory")
    if args.tiny:
        return 32_000_000
    total = device_bytes() or (H200_BYTES if args.plan else None)
    if total is None:
        args.parser.error("there is no GPU here; --tiny runs small models on the CPU, --plan runs nothing")
    kv = GPU_SHARE * total / min(args.at_once, len(args.arms)) - ARM_BYTES
    if kv < 2e9:
        args.parser.error(f"{total / 1e9:.0f} GB are too few for {args.at_once} arms: use --at-once")
    return int(kv)


def setup_of(args: argparse.Namespace) -> Setup:
    """What the arms share, checked against the memory there is."""
    levels = tuple(args.levels)
    setup = Setup(args.model, args.alpha, args.batch, 500 if args.tiny else MAX_LEN, kv_bytes(args), levels, args.tiny)
    each = 1.06 * setup.token_bytes  # 6 %: a draft's KV, whole blocks
    needed = each * max(levels, default=0) * (PROMPT + OUTPUT)
    if needed > setup.kv_bytes and not args.tiny:
        args.parser.error(
            f"{max(levels)} requests need {needed / 1e9:.0f} GB of KV and an arm has {setup.kv_bytes / 1e9:.0f}: use a"
            f" smaller --at-once than {args.at_once}, or fewer --levels"
        )
    for rate in () if args.tiny else args.rates:
        needed = each * max(mixed(rate, args.seconds, seed).most_tokens(SLO_TPOT) for seed in args.seeds)
        if needed > setup.kv_bytes:
            print(f"{rate} requests/s: an arm that takes 15 ms a token has requests wait for KV, {needed / 1e9:.0f} GB")
    return setup


def cells_of(args: argparse.Namespace, vocab: int) -> list[Cell]:
    """Closed loops, then mixed traffic, each in the order given."""
    prompt, output = (20, 8) if args.tiny else (PROMPT, OUTPUT)
    cells = [closed_cell(n, prompt, output, args.seeds, vocab, args.requests, args.each) for n in args.levels]
    for rate in args.rates:
        workloads = [mixed(rate, args.seconds, seed) for seed in args.seeds]
        if args.tiny:
            workloads = [workload.scaled(60, 8) for workload in workloads]
        cells.append(open_cell(rate, [workload.arrivals for workload in workloads], args.seeds, vocab))
    return cells


def show_plan(args: argparse.Namespace, setup: Setup, cells: list[Cell], groups: list[list[Arm]]) -> None:
    """Groups, tasks and expected times."""
    total = 0.0
    print(f"{setup.kv_bytes / 1e9:.1f} GB of KV an arm, {setup.kv_bytes // setup.token_bytes:,} tokens")
    for group in groups:
        turns = [arm.name for arm in group]
        turns += [args.control] if args.control in turns else []
        together = [START_SECONDS[arm.engine] for arm in group if not arm.starts_alone]
        start = max(together, default=0.0) + sum(START_SECONDS["ours"] for arm in group if arm.starts_alone)
        print(f"{' '.join(turns)}: start {start:.0f} s")
        total += start + CLOSING
        for cell in cells:
            seconds = (len(args.seeds) + 0.2) * len(turns) * cell.expected
            total += seconds
            print(
                f"  {cell.name}: {len(args.seeds)} x {len(turns)} x {cell.expected:.1f} s, {seconds:.0f} s with warm-up"
            )
    print(f"{total / 60:.1f} minutes at the pace of vLLM without drafts; --minutes {args.minutes:g}")


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run the arms and report."""
    began = time.monotonic()
    args = arguments(given)
    try:
        setup = setup_of(args)
    except ConfigError as error:
        args.parser.error(str(error))
    cells = cells_of(args, setup.vocab)
    groups = [args.arms[i : i + args.at_once] for i in range(0, len(args.arms), args.at_once)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            starts = {arm.name: start_message(arm, setup, Path(folder) / arm.file_name) for arm in args.arms}
        except ConfigError as error:
            args.parser.error(str(error))
        if args.plan:
            show_plan(args, setup, cells, groups)
            return {}
        logs = args.logs or (args.json.parent if args.json else Path(folder))
        for path in filter(None, (logs, args.json and args.json.parent, args.raw and args.raw.parent)):
            path.mkdir(parents=True, exist_ok=True)
        head: dict[str, Any] = {}

        def save(report: dict[str, Any]) -> None:
            if not head:  # while the first arms start
                about = {
                    name: getattr(args, name) for name in ("levels", "rates", "seeds", "seconds", "alpha", "model")
                }
                about |= {"kv_bytes": setup.kv_bytes, "at_once": args.at_once, "control": args.control}
                settings = {name: message["settings"] for name, message in starts.items()}
                head.update(
                    {**provenance(args.commit), "tiny": args.tiny, **about, "settings": _bare(settings, folder)}
                )
            keep({**head, **report}, args.json)  # after every task

        def append(run: dict[str, Any]) -> None:
            with args.raw.open("a") as file:
                file.write(json.dumps(run) + "\n")

        def start(arm: Arm) -> Worker:
            return Worker(arm, starts[arm.name], logs / f"{arm.file_name}.log", args.peer)

        control = None if args.control == "none" else args.control
        comparison = Comparison(
            args.arms, cells, references=args.reference, control=control, save=save,
            say=lambda text: print(text, flush=True), keep=append if args.raw else None,
        )  # fmt: skip
        comparison.began = began
        comparison.run(groups, start, 60.0 * args.minutes)
    print(table(comparison.report), flush=True)
    return {**head, **comparison.report}


def _bare(settings: Any, folder: str) -> Any:
    """Settings without the folder of this run."""
    return json.loads(json.dumps(settings).replace(folder + "/", ""))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the arms are ended too
    main()
