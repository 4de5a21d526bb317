"""Notes what Triton compiles, as a kernel or another variant of one. Knows Triton's hooks; nothing of kernels."""

from __future__ import annotations

import time
from typing import Any

from verifypd.metrics.pauses import COMPILED, WATCH


class _Compiles:
    """Triton calls it before it compiles, or reads what it has compiled before, and again behind that."""

    def __init__(self, runtime: Any) -> None:
        self._before, self._after = runtime.jit_cache_hook, runtime.jit_post_compile_hook  # somebody else's, or none
        self._begun = 0.0  # s

    def before(self, **about: Any) -> Any:
        """True would keep Triton from compiling."""
        self._begun = time.monotonic()
        return self._before(**about) if self._before else None

    def after(self, **about: Any) -> Any:
        """`repr` has the kernel's name and what it was compiled for."""
        WATCH.note(COMPILED, str(about.get("repr", "")), time.monotonic() - self._begun)
        return self._after(**about) if self._after else None


def watch_compiles() -> None:
    """Note what Triton compiles from now on, where it is installed and has hooks."""
    try:
        from triton import knobs
    except ImportError:
        return
    runtime: Any = knobs.runtime
    if isinstance(getattr(runtime.jit_cache_hook, "__self__", None), _Compiles):
        return
    noted = _Compiles(runtime)
    runtime.jit_cache_hook, runtime.jit_post_compile_hook = noted.before, noted.after
