"""Without a GPU, Triton kernels run in its interpreter. The setting is read when kernels are defined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.interpreter import interpret
from verifypd.kernels import Kernels, build, select

interpret()


@pytest.fixture
def native() -> Kernels:
    if build.library() is None:
        pytest.skip("no C compiler")
    return select("cpu", "native", batch_invariant=True)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)
