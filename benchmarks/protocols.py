"""The original's protocols B and C, like for like, in its models' shapes, for every architecture on one engine.

    python benchmarks/protocols.py --json benchmarks/results/protocols-h200.json
    python benchmarks/protocols.py --parts C --pairs qwen2-1.5b:qwen2-7b
    python benchmarks/protocols.py --tiny                   # small models on a CPU: a test of this script

B: n requests at once, 100 new tokens each, batch 4, verify batch 4. C: n requests by Poisson arrivals, same batch.
Random weights; four drafts a request, which stand by chance as often as the original's did (41 % of drafted tokens).
Two throughputs are given: all tokens emitted over the time taken, and the original's own, tokens of finished requests
over the same time; here every request finishes, so they agree, and its defect shows where requests are cut off.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verifypd import LLM
from verifypd.bench.drive import Drive
from verifypd.bench.dummy import dummy_model, parsed
from verifypd.bench.provenance import provenance
from verifypd.bench.workload import Arrival
from verifypd.control.cost import CostModel
from verifypd.engine.wiring import policies
from verifypd.metrics.stats import percentile

PAIRS = "tinyllama-1.1b:llama-2-7b,qwen2-1.5b:qwen2-7b,gemma-2b:gemma-7b"
ARMS = ("plain", "baseline", "pd", "pdv", "unified", "table", "auto")
ALPHA = 0.68  # of four drafts, 42 % stand
PROMPT, OUTPUT, BATCH = 64, 100, 4
CLAIMS = {  # P95 s as published: baseline, pd, pdv
    "B": {1: (6.70, 6.42, 6.34), 5: (33.1, 33.9, 35.6), 20: (113.6, 123.2, 95.7), 50: (361.7, 368.2, 235.7)},
    "C": {
        "tinyllama-1.1b:llama-2-7b": {5: (42.3, 15.2), 20: (168.4, 46.2)},
        "qwen2-1.5b:qwen2-7b": {5: (33.8, 14.4), 20: (142.4, 45.3)},
        "gemma-2b:gemma-7b": {5: (25.2, 8.8), 20: (137.4, 40.4)},
    },
}


def arrivals(count: int, rate: float | None, seed: int, output: int) -> list[Arrival]:
    """Poisson arrivals; without a rate all at once."""
    noise, at = random.Random(seed), 0.0
    made = []
    for _ in range(count):
        made.append(Arrival(at, PROMPT, output))
        at += noise.expovariate(rate) if rate else 0.0
    return made


def measure(llm: LLM, arm: str, count: int, rate: float | None, seed: int, output: int) -> dict[str, Any]:
    """One arm on one set of arrivals."""
    engine = llm.engine
    controller = "throughput" if arm == "auto" else "fixed"  # the original's draft length, but for `auto`
    engine.architectures = policies(replace(engine.config, controller=controller), engine.cost or CostModel())
    engine.architecture = engine.architectures(arm)
    before = engine.stats.emitted
    found = Drive(engine, seed).arriving(arrivals(count, rate, seed, output), cap=120.0)
    tokens = engine.stats.emitted - before
    ends = found.pop("e2e_s")
    return {
        "p50_s": percentile(ends, 0.5),
        "p95_s": percentile(ends, 0.95),
        "mean_s": sum(ends) / max(1, len(ends)),
        "tok_s": tokens / found["seconds"],
        "tok_s_as_published": output * len(ends) / found["seconds"],
        "acceptance_rate": found["acceptance_rate"],
        "ttft_ms_p95": found["ttft_ms_p95"],
        "tpot_ms_p95": found["tpot_ms_p95"],
        "unfinished": found["unfinished"],
    }


def run_pair(pair: str, parts: str, tiny: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Every arm on every load of the protocols that this pair is part of, arms interleaved."""
    draft, verifier = pair.split(":")
    output = 8 if tiny else OUTPUT
    loads: list[tuple[str, int, float | None]] = []
    if "B" in parts and verifier == "llama-2-7b":
        loads += [("B", n, None) for n in ((1, 5) if tiny else (1, 5, 20, 50))]
    if "C" in parts:
        loads += [("C", 5, 50.0 if tiny else 2.0), ("C", 20, 100.0 if tiny else 5.0)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [dummy_model(name, Path(folder), tiny) for name in (verifier, draft)]
        options: dict[str, Any] = {
            "draft": paths[1], "load_format": "dummy", "batch_size": BATCH, "verify_batch": BATCH, "max_draft": 4,
            "controller": "fixed", "synthetic_acceptance": ALPHA, "prefix_cache": False, "max_model_len": 512,
            **({"kv_memory": "32MB", "dtype": "float32", "measure_costs": False} if tiny else {}), **settings,
        }  # fmt: skip
        with LLM(paths[0], **options) as llm:
            for arm in ARMS:
                measure(llm, arm, 4, None, 99, min(output, 16))  # warm-up
            for name, count, rate in loads:
                key = f"{name} n={count}"
                found[key] = {arm: measure(llm, arm, count, rate, count, output) for arm in ARMS}
                line = ", ".join(f"{arm} {r['p95_s']:.2f}" for arm, r in found[key].items())
                print(f"{pair} {key}: P95 s {line}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the protocols and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="BC", help="protocols: B, C or BC")
    parser.add_argument("--pairs", default=PAIRS, help="draft:verifier, comma-separated")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every engine")
    parser.add_argument("--tiny", action="store_true", help="tiny models: tests this script, means nothing")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--commit", help="where the tree has no git")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not args.tiny:
        parser.error("there is no CUDA device here; --tiny runs small models on the CPU")
    begun = time.perf_counter()
    pairs: dict[str, Any] = {}
    report = {
        **provenance(args.commit), "tiny": args.tiny, "alpha": ALPHA, "prompt": PROMPT, "output": OUTPUT,
        "batch": BATCH, "pairs": pairs, "claims_p95_s": CLAIMS,
    }  # fmt: skip
    for pair in args.pairs.split(","):
        pairs[pair] = run_pair(pair, args.parts, args.tiny, parsed(args.set))
        report["seconds"] = time.perf_counter() - begun
        if args.json:  # after every pair: what was measured is kept, whatever comes
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
