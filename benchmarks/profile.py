"""Where a cycle's time goes on a GPU, kernel by kernel, against the bytes and FLOPs each kind must move and do.

    python benchmarks/profile.py --json benchmarks/results/profile-h200.json
    python benchmarks/profile.py --levels 32 --drafts 2 --set graphs=off

Random weights in the shapes of a pair; requests that decode at one draft length. `idle` is the share of the window in
which the device had nothing to do: gaps between two kernels longer than 8 µs, which is more than the next kernel of a
graph takes to start; `gaps` is all of the time between kernels.
"""

from __future__ import annotations

import sysconfig
import tempfile
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from script import command_line, keep


def __getattr__(name: str) -> Any:
    """What the standard library's `profile` has: cProfile, imported by a script of this folder, finds this one."""
    spec = PathFinder.find_spec("profile", [sysconfig.get_path("stdlib")])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Profile every level and report."""
    import torch  # here, not above: see __getattr__

    from verifypd import LLM
    from verifypd.bench.device import copy_tb_s
    from verifypd.bench.dummy import dummy_model, parsed
    from verifypd.bench.profile import floors, look
    from verifypd.bench.provenance import provenance

    parser = command_line(__doc__)
    parser.add_argument("--pair", default="llama-2-7b,tinyllama-1.1b", help="verifier,draft: built-in shapes")
    parser.add_argument("--levels", default="1,32,128", help="concurrent requests")
    parser.add_argument("--drafts", default="4", help="drafts of each request, one number a level or one for all")
    parser.add_argument("--steps", type=int, default=12, help="steps that are profiled")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("kernels are profiled on a GPU, and there is none here")
    levels = [int(level) for level in args.levels.split(",")]
    lengths = [int(length) for length in args.drafts.split(",")]
    lengths = lengths * len(levels) if len(lengths) == 1 else lengths
    settings = parsed(args.set)
    copy = copy_tb_s(torch.device("cuda"))
    names = tuple(args.pair.split(","))
    report: dict[str, Any] = {**provenance(args.commit), "pair": args.pair, "copy_tb_s": copy, "levels": {}}
    with tempfile.TemporaryDirectory() as folder:
        verifier, draft = (dummy_model(name, Path(folder)) for name in names)
        for level, drafts in zip(levels, lengths, strict=True):
            options: dict[str, Any] = {
                "load_format": "dummy", "batch_size": level, "synthetic_acceptance": 0.8, "prefix_cache": False,
                "max_draft": max(drafts, 1), "arch": "unified", "controller": "fixed", "measure_costs": False,
                **settings,
            }  # fmt: skip
            if not drafts:
                options |= {"arch": "plain", "synthetic_acceptance": None}
            with LLM(verifier, draft=draft if drafts else None, **options) as llm:
                found = look(llm.engine, level, args.steps)
            found["floor_ms"] = floors((names[0], names[1]), level, drafts, 500, copy)
            report["levels"][f"{level}x{drafts}"] = found
            _show(level, drafts, found)
    keep(report, args.json)
    return report


def _show(level: int, drafts: int, found: dict[str, Any]) -> None:
    print(
        f"\n{level} requests, {drafts} drafts: {found['cycle_ms']:.2f} ms, {found['tokens']:.1f} tokens, "
        f"{found['kernels']:.0f} kernels, gaps {found['gaps']:.1%}, idle {found['idle']:.1%}"
    )
    for kind, ms in found["kinds_ms"].items():
        floor = found["floor_ms"].get(kind)
        print(f"  {kind:12} {ms:8.3f} ms" + (f"  floor {floor:.3f}" if floor else ""))
    for row in found["names"]:
        print(f"    {row['us']:8.1f} us x {row['calls']:7.1f}  {row['kind']:10} {row['name']}")


if __name__ == "__main__":
    main()
