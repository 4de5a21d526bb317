"""The built-in pair on one CPU: smollm2 with the draft that ships with it, against plain decoding, arms interleaved.

    python benchmarks/draft_pair.py --json benchmarks/results/draft_pair.json

Three questions. One request: `auto` with the draft against `plain`, on held-out prompts. Copying prompts: look-up,
draft and both side by side. A crowd: 16 requests (--at-once) at once against `plain`. `--sections sampled` is the first
question of requests that are sampled; texts of one setting then differ from arm to arm, unless it has a seed.

Every prompt runs under every arm before the next one does, so that a slow moment of the machine hits all of them; the
order of the arms alternates. Where other processes took more than 2 % of the processor during a job, all arms of that
job run again; how often is reported.

Two engines of one kind differ by what memory they got, up to 1 %: the crowd has a second `plain`, and `against_plain`
is against the mean of both. What memory an engine gets changes from build to build by more than rounds of one build
differ, so the crowd's engines are built several times, in three orders by turns, with a policy that knows what it met
in the warm-up: `by_build` has the ratio of each, and the interval is over builds. A crowd finds no prompt in a prefix
cache: every round computes its prompts again, and its blocks lie where those of the round before lay. `crowd` cuts all
answers at 64 tokens, so that 16 run from the first step to the last; in `ending` they end by themselves, as a server's
do, and few are left at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from script import command_line, keep

# isort: split
import torch

from verifypd import LLM, SamplingParams
from verifypd.bench.provenance import provenance
from verifypd.bench.texts import BEGUN
from verifypd.distil.prompts import evaluation_prompts
from verifypd.engine.costs import device_name
from verifypd.progress import bar

ARMS: dict[str, dict[str, Any]] = {
    "plain": {"draft": None, "arch": "plain"},
    "auto": {"draft": "auto", "arch": "auto", "controller": "throughput", "measure_costs": True},
    "ngram": {"draft": "ngram", "arch": "auto", "controller": "throughput", "measure_costs": True},
    "draft": {"draft": "smollm2-draft", "arch": "auto", "controller": "throughput", "measure_costs": True},
}
NUMBERS: dict[str, dict[str, Any]] = {
    "auto": {},  # as `verifypd serve` chooses, by a timing
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top_k 40": {"temperature": 0.8, "top_k": 40},
    "temperature 1, top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "temperature 0.8, a seed": {"temperature": 0.8, "seed": 1},
}
STUDENT = {2: 12.71, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # of 95 %, by the number of builds
ENDING = 512  # tokens of an answer at most, where answers end by themselves
QUIET = 0.02  # of the processor's time, that other processes may take during a run


def cores() -> set[int]:
    """Those that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def elsewhere() -> float:
    """CPU seconds of our cores that went to other processes since the machine started; 0 where that is not known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ours = {f"cpu{core}" for core in cores()}
    lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
    busy = sum(sum(map(int, line[1:4] + line[6:9])) for line in lines if line[0] in ours)  # all but idle and waiting
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def run_one(
    llm: LLM, prompts: Sequence[list[int]], tokens: int, ends: bool = False, sampling: dict[str, Any] | None = None
) -> tuple[float, list[list[int]], tuple[int, int]]:
    """Seconds, texts, and (drafted, accepted) of the prompts, all at once. `ends`: answers end by themselves."""
    params = SamplingParams(**{"temperature": 0.0, **(sampling or {})}, max_tokens=tokens, ignore_eos=not ends)
    begun = time.perf_counter()
    outputs = llm.generate(list(prompts), params)
    seconds = time.perf_counter() - begun
    counts = sum(o.metrics.drafted for o in outputs), sum(o.metrics.accepted for o in outputs)
    return seconds, [output.outputs[0].token_ids for output in outputs], counts


def compare(
    llms: dict[str, LLM],
    jobs: Sequence[Sequence[list[int]]],
    tokens: int,
    title: str,
    ends: bool = False,
    sampling: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """Every job under every arm, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    scaled: dict[str, list[float]] = {name: [] for name in llms}  # to as many tokens as `plain` made
    texts: dict[str, list[list[int]]] = {name: [] for name in llms}
    counts = {name: [0, 0] for name in llms}
    for llm in llms.values():
        run_one(llm, jobs[0], min(16, tokens), sampling=sampling)  # warm
    disturbed, most = 0, 2 * len(jobs) + 4  # jobs that ran again
    shown = bar(jobs, desc=title)
    for number, job in enumerate(shown):
        names = list(llms)
        while True:
            runs, quiet = {}, True
            for name in names if (number + disturbed) % 2 == 0 else names[::-1]:
                others = elsewhere()
                runs[name] = run_one(llms[name], job, tokens, ends, sampling)
                quiet = quiet and elsewhere() - others <= QUIET * len(cores()) * runs[name][0]
                shown.update(0)
            if quiet or disturbed >= most:
                break
            disturbed += 1
            shown.set_postfix_str(f"{disturbed} ran again")
        for name, (took, made, (drafted, accepted)) in runs.items():
            seconds[name].append(took)
            scaled[name].append(took * sum(map(len, runs["plain"][1])) / sum(map(len, made)))
            texts[name] += made
            counts[name][0] += drafted
            counts[name][1] += accepted
    report: dict[str, Any] = {"repeated": disturbed, "disturbed": disturbed >= most}
    plains = [times for name, times in scaled.items() if name.startswith("plain")]
    base = [sum(each) / len(each) for each in zip(*plains, strict=True)]
    for name, times in seconds.items():
        report[name] = {
            "tokens_per_second": round(sum(map(len, texts[name])) / sum(times), 2),
            "against_plain": round(sum(base) / sum(scaled[name]), 4),
            "interval_95": interval(base, scaled[name]),
            "seconds": [round(took, 3) for took in times],
            "drafted": counts[name][0],
            "accepted": counts[name][1],
            "same_text_as_plain": sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True)),
            "texts": len(texts[name]),
        }
    return report, texts


def interval(base: Sequence[float], times: Sequence[float], draws: int = 2000) -> list[float]:
    """95 % of bootstrap samples over jobs of Σ base / Σ times."""
    noise, found = random.Random(0), []
    for _ in range(draws):
        picked = [noise.randrange(len(base)) for _ in base]
        found.append(sum(base[i] for i in picked) / sum(times[i] for i in picked))
    found.sort()
    return [round(found[math.floor(0.025 * draws)], 4), round(found[math.ceil(0.975 * draws) - 1], 4)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All sections."""
    held_out = evaluation_prompts()
    spread = [held_out[i * len(held_out) // args.prompts] for i in range(args.prompts)]
    report: dict[str, Any] = {"dtypes": {}, "one_request": {}, "sampled": {}, "copying": {}, "crowd": {}, "ending": {}}
    for numbers in args.numbers.split(","):
        with ExitStack() as stack:
            memory = {"batch_size": args.at_once, "kv_memory": f"{19 * args.at_once}MB"}
            options = {"max_model_len": 1024, **memory, **NUMBERS[numbers]}
            first = numbers == args.numbers.split(",")[0]
            copying = first and "copying" in args.sections.split(",")
            arms = {name: arm for name, arm in ARMS.items() if copying or name in ("plain", "auto")}
            llms = {name: stack.enter_context(LLM("smollm2", **arm, **options)) for name, arm in arms.items()}
            plain = llms["plain"]
            report["dtypes"][numbers] = {name: str(llm.engine.verify.runner.model.dtype) for name, llm in llms.items()}
            jobs = [[plain.render([{"role": "user", "content": prompt.text}])] for prompt in spread]
            two = {name: llms[name] for name in ("plain", "auto")}
            if "one" in args.sections.split(","):
                report["one_request"][numbers], _ = compare(two, jobs, args.tokens, f"{numbers}, one request")
            if "sampled" in args.sections.split(","):
                report["sampled"][numbers] = {
                    name: compare(two, jobs, args.tokens, f"{numbers}, {name}", sampling=sampling)[0]
                    for name, sampling in SAMPLED.items()
                }
            if copying:
                copies = [[plain.get_tokenizer().encode(text)] for text in BEGUN]
                report["copying"][numbers], _ = compare(llms, copies * 2, args.tokens, f"{numbers}, copying")
            among = [held_out[i * len(held_out) // args.at_once] for i in range(args.at_once)]
            crowd = [plain.render([{"role": "user", "content": prompt.text}]) for prompt in among]
        for section, ends in (("crowd", False), ("ending", True)):
            if section in args.sections.split(","):
                report[section][numbers] = measure_crowd(args, numbers, crowd, options, ends)
    return report


def measure_crowd(
    args: argparse.Namespace, numbers: str, crowd: Sequence[list[int]], options: dict[str, Any], ends: bool
) -> dict[str, Any]:
    """Rounds of one crowd under `auto` and two engines of `plain`, all of them built anew several times."""
    builds: list[dict[str, Any]] = []
    names = ("plain", "auto", "plain, again")
    tokens, rounds, times = (ENDING, 1, args.endings) if ends else (min(64, args.tokens), args.crowds, args.builds)
    orders = [(*names[build % 3 :], *names[: build % 3]) for build in range(times)]
    for build, order in enumerate(orders):
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(LLM("smollm2", **ARMS[name.partition(",")[0]], **options, prefix_cache=False))
                for name in order
            }
            ordered = {name: engines[name] for name in names}
            title = f"{numbers}, {len(crowd)} at once{' to their ends' if ends else ''}, build {build + 1} of {times}"
            gc.collect()  # what is left of the build before is no part of a round
            builds.append(compare(ordered, [crowd] * rounds, tokens, title, ends)[0])
    report: dict[str, Any] = {"built": orders}
    for name in names:
        ratios = [each[name]["against_plain"] for each in builds]
        mean = statistics.mean(ratios)
        report[name] = {"against_plain": round(mean, 4), "by_build": ratios}
        if len(ratios) > 1:
            wide = STUDENT.get(len(ratios), 2.3) * statistics.stdev(ratios) / math.sqrt(len(ratios))
            report[name]["interval_95"] = [round(mean - wide, 4), round(mean + wide, 4)]
    return {**report, "builds": builds}


def main() -> None:
    """Measure and write."""
    parser = command_line(__doc__)
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts (default: 20)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer (default: 128)")
    parser.add_argument("--at-once", type=int, default=16, help="requests of a crowd (default: 16)")
    parser.add_argument("--crowds", type=int, default=4, help="rounds of a crowd (default: 4)")
    parser.add_argument("--builds", type=int, default=4, help="times the engines of those are built (default: 4)")
    parser.add_argument("--numbers", default="float32,bfloat16,int8", help="of auto, float32, bfloat16, int8")
    parser.add_argument("--endings", type=int, default=3, help="builds of the crowd that ends by itself (default: 3)")
    parser.add_argument(
        "--sections", default="one,copying,crowd,ending", help="some of these, or sampled (default: all)"
    )
    args = parser.parse_args()
    made = provenance(args.commit)
    report = measure(args)
    about = {"cpu": device_name(torch.device("cpu")), "threads": torch.get_num_threads()}
    report = {**made, **about, "prompts": args.prompts, "tokens": args.tokens, "at_once": args.at_once, **report}
    print(json.dumps(report, indent=1))
    keep(report, args.json)


if __name__ == "__main__":
    main()
