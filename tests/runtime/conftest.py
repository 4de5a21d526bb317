"""Without a GPU, Triton kernels run in its interpreter. The setting is read when kernels are defined."""

from __future__ import annotations

from tests.interpreter import interpret

interpret()
