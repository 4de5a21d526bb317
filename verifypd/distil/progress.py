"""Progress bars that also read well in a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """A tqdm bar; where no terminal shows it, one line every ten seconds."""
    return tqdm(items, mininterval=0.1 if sys.stderr.isatty() else 10.0, **options)
