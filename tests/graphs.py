"""What tests of captured kernels share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def replayed(layers: Callable[[], Tensor]) -> Tensor:
    """What layers give, and give again and again when they are captured."""
    expected = layers().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
    return expected
