"""What Ray Serve config files name: `import_path: verifypd.serve_app:app`, with the settings as `args`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verifypd.cluster.config import read

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """The application for these settings: the names of the flags of `verifypd deploy`, with `_` for `-`."""
    from verifypd.cluster.application import build

    return build(read(args))
