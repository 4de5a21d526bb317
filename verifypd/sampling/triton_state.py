"""Columns of `SamplingState` and codes of verdicts, as compile-time constants of the Triton kernels."""

from __future__ import annotations

import triton.language as tl

# columns of SamplingState.floats and .integers
TEMPERATURE: tl.constexpr = tl.constexpr(0)
TOP_P: tl.constexpr = tl.constexpr(1)
LOG_MIN_P: tl.constexpr = tl.constexpr(2)
ALPHA: tl.constexpr = tl.constexpr(6)
FLOATS: tl.constexpr = tl.constexpr(7)
TOP_K: tl.constexpr = tl.constexpr(0)
SEED: tl.constexpr = tl.constexpr(1)
CHOICE: tl.constexpr = tl.constexpr(2)
PROMPT_LEN: tl.constexpr = tl.constexpr(3)
MAX_LEN: tl.constexpr = tl.constexpr(5)
MODE: tl.constexpr = tl.constexpr(7)
INTEGERS: tl.constexpr = tl.constexpr(8)

GREEDY: tl.constexpr = tl.constexpr(0)
REJECTION: tl.constexpr = tl.constexpr(1)
COUPLED: tl.constexpr = tl.constexpr(2)
STOP: tl.constexpr = tl.constexpr(1)  # Finish
LENGTH: tl.constexpr = tl.constexpr(2)
ERROR: tl.constexpr = tl.constexpr(3)
