"""What freed memory that stays with the process is worth on this machine: page faults and tokens/s by purge delay.

    python benchmarks/allocator.py --json benchmarks/results/allocator.json

Where torch comes with mimalloc (its aarch64 wheels), memory that passes free goes back to the system after 10 ms, and
the next pass takes it again page by page. verifypd asks for 10 s. Every arm runs in a process of its own, both delays
in turn; `plain` and `auto` over held-out prompts, one at a time and 16 at once. Elsewhere both delays are the same.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from script import command_line, keep

from verifypd import LLM, SamplingParams
from verifypd.bench.provenance import provenance
from verifypd.distil.prompts import evaluation_prompts

DELAYS = ("10", "10000")  # ms: mimalloc's own, and what verifypd asks for
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"draft": None, "arch": "plain"},
    "auto": {"draft": "auto", "arch": "auto", "controller": "throughput", "measure_costs": True},
}
TOKENS = 64


def one_process(arm: str) -> None:
    """Print tokens/s and page faults a token of one arm, as JSON."""
    options = {"max_model_len": 1024, "batch_size": 16, "kv_memory": "300MB", "dtype": "float32", "prefix_cache": False}
    held_out = evaluation_prompts()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    found = {}
    with LLM("smollm2", **ARMS[arm], **options) as llm:
        texts = [held_out[i * len(held_out) // 20].text for i in range(16)]
        prompts = [llm.render([{"role": "user", "content": text}]) for text in texts]
        for name, jobs in (("1", [[prompt] for prompt in prompts[:8]]), ("16", [prompts])):
            llm.generate(jobs[0], params)  # warm
            faults, begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            for job in jobs:
                llm.generate(job, params)
            seconds = time.perf_counter() - begun
            tokens = TOKENS * sum(map(len, jobs))
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            found[name] = {"tokens_per_second": tokens / seconds, "faults_per_token": faults / tokens}
    print(json.dumps(found))


def measure(rounds: int) -> dict[str, Any]:
    """All arms under both delays, in turn."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {arm: {delay: [] for delay in DELAYS} for arm in ARMS}
    for number in range(rounds):
        for arm in ARMS:
            for delay in DELAYS if number % 2 == 0 else DELAYS[::-1]:
                print(f"round {number + 1} of {rounds}: {arm}, {delay} ms", file=sys.stderr, flush=True)
                done = subprocess.run(
                    [sys.executable, __file__, "--arm", arm],
                    env={**os.environ, "MIMALLOC_PURGE_DELAY": delay},
                    stdout=subprocess.PIPE, text=True, check=True,
                )  # fmt: skip
                runs[arm][delay].append(json.loads(done.stdout.splitlines()[-1]))
    report: dict[str, Any] = {}
    for arm, by_delay in runs.items():
        for level in ("1", "16"):
            rates = {d: [run[level]["tokens_per_second"] for run in by_delay[d]] for d in DELAYS}
            faults = {d: statistics.mean(run[level]["faults_per_token"] for run in by_delay[d]) for d in DELAYS}
            report[f"{arm}, {level} at once"] = {
                "tokens_per_second": {d: [round(rate, 2) for rate in rates[d]] for d in DELAYS},
                "faults_per_token": {d: round(value, 2) for d, value in faults.items()},
                "gain": [round(b / a, 4) for a, b in zip(rates[DELAYS[0]], rates[DELAYS[1]], strict=True)],
            }
    return report


def main() -> None:
    """Measure and write."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (default: 3)")
    parser.add_argument("--arm", choices=ARMS, help="measure this one in this process, with the delay it was given")
    args = parser.parse_args()
    if args.arm:
        one_process(args.arm)
        return
    report = {**provenance(args.commit), "rounds": args.rounds, "figures": measure(args.rounds)}
    print(json.dumps(report, indent=1))
    keep(report, args.json)


if __name__ == "__main__":
    main()
