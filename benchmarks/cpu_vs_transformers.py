"""Verify-PD against transformers on one CPU, with the built-in model, arms interleaved in one run.

    python benchmarks/cpu_vs_transformers.py --json benchmarks/results/cpu_vs_transformers.json

Every round runs every arm on the same prompts, so that a slow moment of the machine hits all of them; ratios are of
medians over rounds. The floor is what reading the weights once takes at the measured memory bandwidth. `--quick` leaves
out the copying arms and the error of the weights: about a minute.

`verifypd bench run --arm transformers` compares latencies with `generate` of one dtype. Only this script has the floor,
the better dtype of two, concurrent requests against `generate` one by one, and what rounded weights do to the text.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from script import command_line, keep

import verifypd  # noqa: F401, before torch, whose allocator it sets

# isort: split
import torch
import transformers

from verifypd import LLM, SamplingParams
from verifypd.bench.assisted import built_in
from verifypd.bench.provenance import provenance
from verifypd.bench.texts import BEGUN, PROSE


def generate_reference(model: Any, prompts: list[list[int]], tokens: int) -> None:
    """Sequential `generate`, greedy, exactly `tokens` new tokens each."""
    for ids in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out.shape[1] == len(ids) + tokens


def best_reference(prompt: list[int]) -> tuple[str, Any]:
    """transformers in the dtype that is faster on this CPU, by a probe of a few tokens."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = built_in().to(dtype).eval()
        generate_reference(model, [prompt], 2)
        started = time.perf_counter()
        generate_reference(model, [prompt], 4)
        found[str(dtype).removeprefix("torch.")] = (time.perf_counter() - started, model)
    name = min(found, key=lambda key: found[key][0])
    return name, found[name][1]


def bandwidth() -> float:
    """Bytes a second of reading memory, the best of several sums over 256 MB."""
    data = torch.ones(64 * 1024 * 1024)
    times = []
    for _ in range(8):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return data.numel() * 4 / min(times)


def engine(arch: str, draft: str | None, **settings: Any) -> LLM:
    """An arm: the built-in model with enough memory for every case."""
    return LLM("smollm2", draft=draft, arch=arch, max_model_len=2048, kv_memory="512MB", prefix_cache=False, **settings)


def run(llm: LLM, prompts: list[list[int]], tokens: int) -> None:
    """Greedy, exactly `tokens` new tokens for each prompt, all at once."""
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)


def errors(prompts: list[list[int]], tokens: int) -> dict[str, dict[str, float]]:
    """How far bf16 and int8 weights move the model: along fp32's own greedy text, KL and agreement of the argmax."""
    texts, laws = [], {}
    for name, settings in (("float32", {}), ("bfloat16", {}), ("int8", {"quantization": "int8"})):
        dtype = "float32" if name == "int8" else name
        with engine("plain", None, dtype=dtype, **settings) as llm:
            if not texts:
                params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
                texts = [
                    [*p, *o.outputs[0].token_ids] for p, o in zip(prompts, llm.generate(prompts, params), strict=True)
                ]
            rows = []
            for text in texts:
                logits: list[torch.Tensor] = []
                original = llm.engine.verify.runner.logits
                llm.engine.verify.runner.logits = lambda hidden, keep=logits, call=original: (
                    keep.append(call(hidden)) or keep[-1]
                )  # type: ignore[method-assign]
                llm.generate([text], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
                llm.engine.verify.runner.logits = original  # type: ignore[method-assign]
                rows.append(torch.cat([part for part in logits if part.shape[0] > 1]).log_softmax(-1))
            laws[name] = torch.cat(rows)
    base = laws["float32"]
    return {
        name: {
            "mean_kl": float((base.exp() * (base - law)).sum(-1).mean()),
            "argmax_agreement": float((law.argmax(-1) == base.argmax(-1)).float().mean()),
        }
        for name, law in laws.items()
        if name != "float32"
    }


def main() -> None:
    """Run all arms, print a table, write the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="no copying arms, no error of the weights")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    made = provenance(args.commit)

    speed = bandwidth()
    arms: dict[str, LLM] = {
        "plain": engine("plain", None),
        "plain fp32": engine("plain", None, dtype="float32"),
        "plain int8": engine("plain", None, dtype="float32", quantization="int8"),
        "ngram": engine("unified", "ngram"),
    }
    tokenizer = arms["plain"].get_tokenizer()
    prose = [tokenizer.encode(text) for text in PROSE[:2]]
    copying = [tokenizer.encode(text) for text in BEGUN]
    many = [prose[i % len(prose)] for i in range(16)]
    dtype, model = best_reference(prose[0])

    cases: dict[str, tuple[int, Callable[[], None]]] = {
        f"transformers {dtype}, 1 request": (len(prose), lambda: generate_reference(model, prose, args.tokens)),
        "plain, 1 request": (len(prose), lambda: [run(arms["plain"], [p], args.tokens) for p in prose]),
        "plain fp32, 1 request": (len(prose), lambda: [run(arms["plain fp32"], [p], args.tokens) for p in prose]),
        "plain int8, 1 request": (len(prose), lambda: [run(arms["plain int8"], [p], args.tokens) for p in prose]),
        "plain, 16 concurrent": (16, lambda: run(arms["plain"], many, args.tokens)),
        "plain fp32, 16 concurrent": (16, lambda: run(arms["plain fp32"], many, args.tokens)),
        "plain, copying, 1 request": (len(copying), lambda: [run(arms["plain"], [p], args.tokens) for p in copying]),
        "ngram, copying, 1 request": (len(copying), lambda: [run(arms["ngram"], [p], args.tokens) for p in copying]),
    }
    if args.quick:
        cases = {name: case for name, case in cases.items() if "copying" not in name}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(args.rounds + 1):
        for name, (requests, work) in cases.items():
            started = time.perf_counter()
            work()
            rate = requests * args.tokens / (time.perf_counter() - started)
            if round_index:  # the first round warms up
                rates[name].append(rate)
        print(f"round {round_index}/{args.rounds}", file=sys.stderr, flush=True)

    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = medians[f"transformers {dtype}, 1 request"]
    weights = {name: llm.engine.verify.runner.model.weight_bytes for name, llm in arms.items()}
    figures = {
        "single_over_transformers": medians["plain, 1 request"] / base,
        "single_fp32_over_transformers": medians["plain fp32, 1 request"] / base,
        "batch16_over_transformers": medians["plain, 16 concurrent"] / base,
        "batch16_fp32_over_transformers": medians["plain fp32, 16 concurrent"] / base,
        "bandwidth_gb_s": speed / 1e9,
        **{
            f"floor_ms_{name.replace(' ', '_')}": weights[name] / speed * 1e3
            for name in ("plain", "plain fp32", "plain int8")
        },
        **{
            f"fraction_of_floor_{name.replace(' ', '_')}": weights[name] / speed * medians[f"{name}, 1 request"]
            for name in ("plain", "plain fp32", "plain int8")
        },
    }
    if not args.quick:
        figures["ngram_over_plain"] = medians["ngram, copying, 1 request"] / medians["plain, copying, 1 request"]
    report: dict[str, Any] = {
        **made,
        "threads": args.threads,
        "transformers": transformers.__version__,
        "dtype": {name: str(llm.engine.verify.runner.model.dtype) for name, llm in arms.items()},
        "tokens": args.tokens,
        "tokens_per_second": rates,
        "figures": figures,
    }
    print_table(medians, base, figures)
    for llm in arms.values():
        llm.shutdown()
    arms.clear()
    report["weight_error"] = {} if args.quick else errors(prose[:2] + copying[:1], 32)
    for name, values in report["weight_error"].items():
        print(f"{name} weights: KL to fp32 {values['mean_kl']:.5f}, argmax agrees {values['argmax_agreement']:.4f}")
    keep(report, args.json)


def print_table(medians: dict[str, float], base: float, figures: dict[str, float]) -> None:
    """What a person wants to see."""
    width = max(map(len, medians))
    print(f"{'arm':{width}}  tokens/s  x transformers")
    for name, rate in medians.items():
        print(f"{name:{width}}  {rate:8.1f}  {rate / base:14.2f}")
    for name, value in figures.items():
        print(f"{name:40} {value:.3f}")


if __name__ == "__main__":
    main()
