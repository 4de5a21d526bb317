"""Without a GPU, Triton kernels run in its interpreter. The setting is read when kernels are defined."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
