"""Where a top_p cut lies, and the noise of coupled draws, in C. Knows rows of numbers; nothing of requests."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from verifypd.errors import ConfigError
from verifypd.kernels import build
from verifypd.sampling.philox import Role, gumbel_of


@functools.cache
def functions() -> ctypes.CDLL:
    """Those of native.c."""
    loaded = build.library()
    if loaded is None:
        raise ConfigError("--sampler native needs a C compiler: install gcc or clang, or use --sampler torch")
    return loaded


def top_p_threshold(weight: Tensor, share: Tensor) -> Tensor:
    """As `histogram_threshold`: weight [N, V] and share [N, 1] float32."""
    rows, vocab = weight.shape
    weight, share = weight.contiguous(), share.contiguous()
    threshold = torch.empty_like(share)
    if functions().vpd_top_p(
        weight.data_ptr(), rows, vocab, share.data_ptr(), threshold.data_ptr(), torch.get_num_threads()
    ):
        raise MemoryError("no memory for a top_p cut")
    return threshold


def gumbel(seeds: Tensor, choices: Tensor, indices: Tensor, vocab: int) -> Tensor:
    """As in philox."""
    seeds, choices, indices = seeds.contiguous(), choices.contiguous(), indices.contiguous()
    groups = -(-vocab // 4)
    noise = torch.empty(len(seeds), 4 * groups)
    functions().vpd_noise(
        seeds.data_ptr(), choices.data_ptr(), indices.data_ptr(), len(seeds), groups, int(Role.GUMBEL),
        noise.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return gumbel_of(noise)[:, :vocab]
