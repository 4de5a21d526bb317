"""From how many rows AMX tiles pay: engines of smollm2 that use them from one row on, from two, and never, by turns.

    python benchmarks/tile_rows.py --json tile_rows.json     # x86 with AMX; some two minutes

Three kinds of work: one request without drafts (passes of one row), one request with four drafts at every pass (five
rows, and the draft's own), and 16 requests at once. Every engine does each job before the next job begins, in turning
order, so that other work on the machine hits all of them. A pass's time is (last token - first token) / passes. Drafts
are accepted by chance, so weights may be any; `faults` are pages that the system had to hand out.
"""

from __future__ import annotations

import resource
import statistics
import time
from contextlib import ExitStack
from typing import Any

from script import command_line, keep

from verifypd import LLM, SamplingParams
from verifypd.bench.provenance import provenance
from verifypd.kernels import native

DRAFTS = 4
ACCEPTED = 0.62  # of drafts, by chance: 2.4 tokens a pass, as many as the built-in pair has
OPTIONS: dict[str, Any] = {
    "draft": "smollm2-draft", "arch": "unified", "controller": "fixed", "max_draft": DRAFTS, "max_model_len": 1024,
    "batch_size": 16, "kv_memory": "304MB", "prefix_cache": False, "synthetic_acceptance": ACCEPTED,
    "measure_costs": False,
}  # fmt: skip


def build(stack: ExitStack, rows: str, dtype: str, int8: bool) -> LLM:
    """An engine whose tiles begin at so many rows; as it is served where that is `served`."""
    if rows != "served":
        native.TILE_ROWS = int(rows)
    quantization = {"quantization": "int8"} if int8 else {}
    return stack.enter_context(LLM("smollm2", dtype=dtype, **quantization, **OPTIONS))


def job(llm: LLM, arch: str, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Times of one job."""
    llm.engine.switch(arch)
    faults, begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    seconds = time.perf_counter() - begun
    times = [output.metrics for output in outputs]
    passes = sum(each.passes for each in times)
    alone = sum((each.finished_time or 0.0) - (each.first_token_time or 0.0) for each in times)
    return {
        "tokens_per_second": sum(len(output.outputs[0].token_ids) for output in outputs) / seconds,
        "pass_ms": 1e3 * alone / passes,
        "rows": 1 + sum(each.drafted for each in times) / passes,
        "tokens_a_pass": sum(each.emitted for each in times) / passes,
        "faults": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / passes,
    }


def main() -> None:
    """All jobs under all engines, by turns."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", default="0,2,1", help="tiles begin at, 0: nowhere; or 'served' (default: 0,2,1)")
    parser.add_argument("--rounds", type=int, default=6, help="(default: 6)")
    parser.add_argument("--crowds", type=int, default=3, help="rounds of 16 requests (default: 3)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default: 64)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--int8", action="store_true", help="weights in int8")
    args = parser.parse_args()
    report: dict[str, Any] = provenance(args.commit)
    names = args.rows.split(",")
    with ExitStack() as stack:
        llms = {name: build(stack, name, args.dtype, args.int8) for name in names}
        texts = [f"Tell me {count + 2} things about the number {count}." for count in range(16)]
        crowd = [llms[names[0]].render([{"role": "user", "content": text}]) for text in texts]
        kernels = {name: llm.engine.verify.runner.model.kernels for name, llm in llms.items()}
        report["tile_rows"] = {name: getattr(each, "tile_rows", None) for name, each in kernels.items()}
        works = {"plain": ("plain", 1, args.rounds), "drafts": ("unified", 1, args.rounds)}
        works["crowd"] = ("plain", len(crowd), args.crowds)
        report["jobs"] = {}
        for work, (arch, count, rounds) in works.items():
            found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for turn in range(rounds + 1):
                prompts = [crowd[turn % len(crowd)]] if count == 1 else crowd
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    took = job(llms[name], arch, prompts, args.tokens if turn else 8)
                    if turn:  # the first warms up
                        found[name].append(took)
            report["jobs"][work] = {
                name: {key: round(statistics.median(each[key] for each in every), 3) for key in every[0]}
                | {"each_ms": [round(each["pass_ms"], 2) for each in every]}
                for name, every in found.items()
            }
            for name, each in report["jobs"][work].items():
                print(f"{work:7} {name:>7}", *(f"{key} {value}" for key, value in each.items()), flush=True)
            keep(report, args.json)


if __name__ == "__main__":
    main()
