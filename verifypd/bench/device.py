"""Time of device work, and what the device can do at most. Knows events and graphs; nothing of models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from verifypd.runtime.streams import synchronize

SHAPES = {  # layers, hidden, heads, key heads, head width, MLP, vocabulary
    "tinyllama-1.1b": (22, 2048, 32, 4, 64, 5632, 32000),
    "llama-2-7b": (32, 4096, 32, 32, 128, 11008, 32000),
    "codellama-34b": (48, 8192, 64, 8, 128, 22016, 32000),
    "qwen2-1.5b": (28, 1536, 12, 2, 128, 8960, 151936),
    "qwen2-7b": (28, 3584, 28, 4, 128, 18944, 152064),
    "gemma-2b": (18, 2048, 8, 1, 256, 16384, 256000),
    "gemma-7b": (28, 3072, 16, 16, 256, 24576, 256000),
}


def median_ms(work: Callable[[], object], device: torch.device, repeats: int = 30, warm_up: int = 3) -> float:
    """Median ms of one call: by events around a captured graph's replays on CUDA, by the clock elsewhere."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(_clocked(work) for _ in range(repeats))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    pairs = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        pairs.append((begin, end))
    synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def _clocked(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def copy_tb_s(device: torch.device, size: int = 4 << 30) -> float:
    """Bytes read and written by a large copy, TB/s. Not through a graph: there it would be another copy engine's."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    best = 1e9
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        synchronize(device)
        best = min(best, begin.elapsed_time(end))
    return 2 * size / best / 1e9


def product_tflop_s(device: torch.device, size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """A large matrix product on random numbers, TFLOP/s."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device, 10) / 1e9
