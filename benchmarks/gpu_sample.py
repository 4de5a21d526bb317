"""What `/metrics` shows of a GPU, idle and under two loads, read through the server's own sampler.

python benchmarks/gpu_sample.py --json benchmarks/results/gpu-sample.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from script import command_line, keep

from verifypd.bench.provenance import provenance
from verifypd.metrics.gpu import GpuSampler


def under(sampler: GpuSampler, load: Callable[[], Any], seconds: float = 2.0) -> dict[str, float]:
    """Figures over some seconds of a load."""
    load()
    torch.cuda.synchronize()
    sampler.read(time.monotonic)
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        load()
        torch.cuda.synchronize()
    return sampler.read(time.monotonic)


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    args = parser.parse_args()
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(4 << 30, device="cuda", dtype=torch.uint8)
    to = torch.empty_like(big)
    sampler = GpuSampler(0)
    record = {
        **provenance(args.commit),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "samples": {
            "idle": under(sampler, lambda: time.sleep(0.1), 1.0),
            "matmul": under(sampler, lambda: [x @ x for _ in range(20)]),
            "copy": under(sampler, lambda: [to.copy_(big) for _ in range(5)]),
        },
    }
    print(json.dumps(record, indent=1))
    keep(record, args.json)


if __name__ == "__main__":
    main()
