"""Host waiting: spin polling against blocking waits, as an ablation on one CUDA device. Under a minute.

    python benchmarks/host_waiting.py --json benchmarks/results/host-waiting.json

First it checks that lanes on streams of their own (`--placement stream`) write the same greedy texts as fused ones, and
that both ways of waiting do. Then, arms interleaved in every round:

- a kernel of known length and a copy to the host: what waiting adds, beyond what the device took;
- a model in the shape of TinyLlama-1.1B with random weights, plain decoding at some batch sizes: ms a step, tokens a
  second, and how much of a core the process used.

Needs torch, numpy, safetensors and tokenizers only. With `--device cpu` it runs on a tiny model and shows that there is
nothing to wait for: a launch on a CPU is the work itself.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from script import command_line, keep

from verifypd import LLM, SamplingParams
from verifypd.bench.provenance import provenance
from verifypd.config import WAITS
from verifypd.models.builtin import BUILTINS
from verifypd.runtime.streams import HostCopy, synchronize

TINY: dict[str, Any] = {
    **BUILTINS["tinyllama-1.1b"].raw,
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
KERNELS = (0.2e-3, 1e-3, 5e-3)  # s
PLACEMENTS = ("fused", "stream", "decode=stream", "prefill=stream,verify=stream")


def shape(folder: Path, name: str, **changes: Any) -> str:
    """A folder with a config and no weights: they are random."""
    place = folder / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**TINY, **changes}))
    return str(place)


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Token ids, the second half of each repeating the first, so that n-grams match."""
    made = []
    for i in range(count):
        half = [3 + (i * 131 + j * j * 17) % (vocab - 3) for j in range(max(1, length // 2 + i % 7))]
        made.append((half * 2)[:length] or half)
    return made


# -- the same texts ----------------------------------------------------------------------------------------------------


def check_texts(device: str) -> int:
    """Greedy texts under every placement, way of waiting and some architectures; returns how many were compared."""
    compared = 0
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"device": device, "dtype": "float32", "load_format": "dummy", "kv_memory": "256MB"}
    options |= {"max_draft": 3, "max_model_len": 256, "batch_size": 6, "prefill_chunk": 11, "measure_costs": False}
    with tempfile.TemporaryDirectory() as folder:
        verifier = shape(Path(folder), "verifier")
        other = shape(Path(folder), "draft", num_hidden_layers=2)
        work = prompts(10, 24, TINY["vocab_size"])
        with LLM(verifier, draft=None, arch="plain", **{**options, "batch_size": 1}) as llm:
            expected = [llm.generate([ids], params)[0].outputs[0].token_ids for ids in work]
        for arch, draft in (("unified", verifier), ("pd", "ngram"), ("pdv", verifier), ("pdv", other)):
            lanes = {"verify_batch": 2} if arch == "pdv" else {}
            for placement, wait in itertools.product(PLACEMENTS, WAITS):
                arm = {"draft": draft, "arch": arch, "placement": placement, "wait": wait}
                with LLM(verifier, **arm, **lanes, **options) as llm:
                    found = [output.outputs[0].token_ids for output in llm.generate(work, params)]
                    assert llm.engine.stats.drafted, "nothing was drafted: the check would mean little"
                    llm.engine.drain()
                    llm.engine.check()
                for index, (ours, plain) in enumerate(zip(found, expected, strict=True)):
                    assert ours == plain, f"{arm}: request {index} differs from plain decoding"
                compared += len(found)
    return compared


# -- what waiting adds -------------------------------------------------------------------------------------------------


def cycles_per_second() -> float:
    """Of the device's own counter, which `_sleep` counts by."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / (begin.elapsed_time(end) / 1e3)


def wake_up(wait: str, cycles: int) -> tuple[float, float]:
    """s that waiting for a kernel and a copy took beyond the device's own time, and s of processor time."""
    data = torch.zeros(64, dtype=torch.int64, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    synchronize(data.device)
    busy, started = time.process_time(), time.perf_counter()
    begin.record()
    torch.cuda._sleep(cycles)
    copy = HostCopy({"x": data}, wait)
    end.record()
    copy.wait()
    wall, busy = time.perf_counter() - started, time.process_time() - busy
    synchronize(data.device)
    return wall - begin.elapsed_time(end) / 1e3, busy


def time_wake_ups(rounds: int) -> list[dict[str, Any]]:
    """Every way of waiting at every length of kernel, in turn."""
    rate = cycles_per_second()
    found: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for round_index in range(rounds + 5):
        for seconds in KERNELS:
            for wait in WAITS:
                value = wake_up(wait, int(rate * seconds))
                if round_index >= 5:  # the first ones warm up
                    found.setdefault((seconds, wait), []).append(value)
    return [
        {
            "kernel_ms": seconds * 1e3,
            "wait": wait,
            "added_us_median": statistics.median(added for added, _ in values) * 1e6,
            "added_us_p95": sorted(added for added, _ in values)[int(0.95 * len(values))] * 1e6,
            "processor_us_median": statistics.median(busy for _, busy in values) * 1e6,
        }
        for (seconds, wait), values in found.items()
    ]


# -- what it means for decoding ----------------------------------------------------------------------------------------


def time_decoding(llm: LLM, batches: list[int], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Plain decoding of random prompts, ways of waiting in turn, on one engine."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    vocab = llm.engine.sampling.vocab
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    for round_index in range(rounds + 1):
        for batch in batches:
            work = prompts(batch, 32, vocab)
            for wait in WAITS:
                llm.engine.verify.wait = wait
                busy, steps = time.process_time(), llm.engine.stats.steps
                started = time.perf_counter()
                outputs = llm.generate(work, params)
                wall = time.perf_counter() - started
                steps = llm.engine.stats.steps - steps
                assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
                if round_index:  # the first round warms up
                    figures = {"wall": wall, "busy": time.process_time() - busy, "steps": steps}
                    found.setdefault((batch, wait), []).append(figures)
    return [
        {
            "batch": batch,
            "wait": wait,
            "ms_per_step": [1e3 * v["wall"] / v["steps"] for v in values],
            "tokens_per_second": [batch * tokens / v["wall"] for v in values],
            "cores_used": [v["busy"] / v["wall"] for v in values],
        }
        for (batch, wait), values in found.items()
    ]


def show(report: dict[str, Any]) -> None:
    """What a person wants to see."""
    print(f"{report['texts_compared']} greedy texts equal plain decoding's, under placements")
    print(f"{', '.join(PLACEMENTS)} and waits {', '.join(WAITS)}")
    if report["wake_up"]:
        print("\nkernel ms  wait   added µs (p95)   processor µs")
        for row in report["wake_up"]:
            print(
                f"{row['kernel_ms']:9.1f}  {row['wait']:5}  {row['added_us_median']:7.1f} ({row['added_us_p95']:6.1f})"
                f"  {row['processor_us_median']:12.0f}"
            )
    print("\nbatch  wait   ms/step (rounds)                      tokens/s  cores used")
    for row in report["decoding"]:
        each = " ".join(f"{value:.3f}" for value in row["ms_per_step"])
        print(
            f"{row['batch']:5}  {row['wait']:5}  {statistics.median(row['ms_per_step']):6.3f} ({each})".ljust(54)
            + f"{statistics.median(row['tokens_per_second']):8.0f}  {statistics.median(row['cores_used']):10.2f}"
        )


def main() -> None:
    """Check, time, print, write."""
    parser = command_line(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,8,32")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        parser.error("PyTorch sees no CUDA device; --device cpu runs the same code without anything to wait for")
    logging.getLogger("verifypd").setLevel(logging.ERROR)  # models without a tokenizer are meant
    began = time.perf_counter()
    report: dict[str, Any] = provenance(args.commit)
    report["texts_compared"] = check_texts(args.device)
    report["wake_up"] = time_wake_ups(40) if on_gpu else []
    batches = [int(part) for part in args.batches.split(",")]
    options: dict[str, Any] = {"device": args.device, "load_format": "dummy", "kv_memory": "2GB", "max_model_len": 512}
    options |= {"batch_size": max(batches), "prefix_cache": False, "prefill_chunk": 2048}
    with tempfile.TemporaryDirectory() as folder:
        model = "tinyllama-1.1b" if on_gpu else shape(Path(folder), "model")
        with LLM(model, draft=None, arch="plain", **options) as llm:
            report["model"] = "tinyllama-1.1b, random weights" if on_gpu else "tiny, random weights"
            report["dtype"] = str(llm.engine.verify.runner.model.dtype)
            report["decoding"] = time_decoding(llm, batches, args.tokens, args.rounds)
    report["seconds"] = time.perf_counter() - began
    show(report)
    keep(report, args.json)


if __name__ == "__main__":
    main()
