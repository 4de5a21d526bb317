"""Sampling that a model's folder asks for where a request says nothing: `generation_config.json`, as vLLM reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verifypd.errors import RequestError, TokenizerError
from verifypd.request import SamplingParams

# transformers' own defaults: a file that says one of these asks for nothing
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "repetition_penalty": 1.0}


def sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """By the names of SamplingParams; empty where there is no folder or no such file."""
    path = None if folder is None else folder / "generation_config.json"
    if path is None or not path.is_file():
        return {}
    instead = "correct it, or start with --generation-config none"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found = {name: raw[name] for name, neutral in NEUTRAL.items() if raw.get(name) not in (None, neutral)}
        if isinstance(found.get("top_k"), float) and found["top_k"].is_integer():
            found["top_k"] = int(found["top_k"])  # as some tools write it
        SamplingParams(**found)
    except RequestError as error:
        raise TokenizerError(f"{path}: {error}; {instead}") from None
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read ({error}); {instead}") from None
    return found
