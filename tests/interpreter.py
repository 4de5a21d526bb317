"""Without a GPU, Triton kernels run in its interpreter. Work of its own that leads to nothing is left out.

The setting is read when kernels are defined: conftest files call this before.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import cache
from typing import Any

import torch


def interpret() -> None:
    """Have kernels interpreted in this process, if nothing can run them."""
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        shorten()


@cache  # several folders call it
def shorten() -> None:
    """The same results in about half of the time, where Triton's interpreter is the one that was read for this."""
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("interpreter_builder", "_get_np_dtype", "_patch_lang")):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # sums are made again, in 64 bits, for an assertion that only debugging raises
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = once_a_type(interpreter._get_np_dtype)
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)


def once_a_type(find: Any) -> Any:
    """NumPy's type for one of Triton's is looked up in a table that is written anew for each look."""
    found: dict[str, Any] = {}

    def known(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    return known


def once_a_launch(patch: Any) -> Any:
    """A kernel's launch patches the language and restores it; functions that it calls patch all of it again."""
    patched: set[str] = set()
    names = {"triton.language", "triton.language.core"}

    @cache
    def language(fn: Any) -> set[str]:
        return names & {getattr(value, "__name__", "") for value in fn.__globals__.values()}

    def patch_unless_done(fn: Any) -> Any:
        if patched and language(fn) <= patched:
            return None  # functions leave it to the launch to restore
        launch = not patched
        scope = patch(fn)
        patched.update(language(fn))
        if launch:
            restore = scope.restore

            def restored() -> None:
                patched.clear()
                restore()

            scope.restore = restored
        return scope

    return patch_unless_done
