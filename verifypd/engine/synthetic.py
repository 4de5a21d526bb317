"""Synthetic acceptance: the chance that a draft token stands, set from outside. For performance work."""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path

from verifypd.errors import ConfigError


class SyntheticAcceptance:
    """α of a request at an output index: one value, values taken in turn by arriving requests, or curves from a file.

    A drift file is JSON: {"curves": [[[output index, α], …], …]}; request i follows curve i modulo their number,
    linear between its points.
    """

    def __init__(self, alphas: tuple[float, ...] | str) -> None:
        self.curves = _read_curves(alphas) if isinstance(alphas, str) else [((0.0, alpha),) for alpha in alphas]
        self.drifts = isinstance(alphas, str)

    def value(self, request: int, output_index: int) -> float:
        """α for the next draft of request number `request`, which has emitted `output_index` tokens."""
        curve = self.curves[request % len(self.curves)]
        after = bisect_right([at for at, _ in curve], output_index)
        if after == 0:
            return curve[0][1]
        if after == len(curve):
            return curve[-1][1]
        (x0, y0), (x1, y1) = curve[after - 1], curve[after]
        return y0 + (y1 - y0) * (output_index - x0) / (x1 - x0)


def _read_curves(path: str) -> list[tuple[tuple[float, float], ...]]:
    try:
        data = json.loads(Path(path).read_text())
        curves = [tuple((float(at), float(alpha)) for at, alpha in curve) for curve in data["curves"]]
    except OSError as error:
        raise ConfigError(f"--synthetic-acceptance: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        curves = []
    rising = all(a[0] < b[0] for curve in curves for a, b in zip(curve, curve[1:], strict=False))
    if not curves or not all(curves) or not rising or not all(0 <= y <= 1 for curve in curves for _, y in curve):
        raise ConfigError(
            f'--synthetic-acceptance: {path} must hold {{"curves": [[[output index, alpha], ...], ...]}} '
            "with rising indices and alpha in 0..1"
        )
    return curves
