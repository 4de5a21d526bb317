"""What tests of the API ask, and the engine's own answer to it."""

from __future__ import annotations

from typing import Any

from verifypd import LLM, SamplingParams
from verifypd.request import CompletionOutput

PROMPT = "the cat sat on the mat"
IDS = [5, 9, 200, 31, 7, 9, 200, 31]
FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Ulm", "Bonn"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def own(fields: dict[str, Any]) -> dict[str, Any]:
    """These fields as SamplingParams has them."""
    return {
        name: {int(k): v for k, v in value.items()} if name == "logit_bias" else value for name, value in fields.items()
    }


def said(offline: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    """What the engine says to a prompt."""
    return offline.generate(prompt, SamplingParams(**params))[0].outputs[0]
