"""Tables of draft and verifier on devices of their own: measured as processes on two cores, and simulated."""

from __future__ import annotations

from typing import Any

from cells import read, rows, source

MEASURED, SIMULATED = "dual-device", "dual-device-simulated"
VERIFIERS = {"7B": "tinyllama-1.1b:llama-2-7b", "34B": "tinyllama-1.1b:codellama-34b"}
LEVELS = (1, 8, 32)


def measured() -> str:
    """Tokens/s, and the gap's p95, of a draft in the verifier's process and apart."""
    found = {(each["requests"], each["arm"]): each for each in read(MEASURED)["measured"]["arms"]}
    lines = []
    for level in dict.fromkeys(level for level, _ in found):
        arms = [found[level, arm] for arm in ("fused", "apart", "ahead")]
        ahead = arms[2]["tokens_per_s"] / arms[1]["tokens_per_s"]
        lines.append([str(level), *map(_cell, arms), f"{ahead:.2f}"])
    header = ["requests", "fused, both cores", "apart, one core each", "with draft-ahead", "ahead over apart"]
    return rows(header, lines) + source(MEASURED)


def simulated() -> str:
    """Tokens/s of two devices with draft-ahead over those of one, at two acceptance probabilities."""
    found = {
        (each["pair"], each["alpha"], each["requests"], each["arm"]): each["tokens_per_s"]
        for each in read(SIMULATED)["simulated"]["arms"]
    }

    def cell(pair: str, level: int) -> str:
        return ", ".join(f"{found[pair, a, level, 'ahead'] / found[pair, a, level, 'fused']:.2f}" for a in (0.6, 0.8))

    lines = [[str(level), *(cell(pair, level) for pair in VERIFIERS.values())] for level in LEVELS]
    return rows(["requests", *(f"{size} verifier" for size in VERIFIERS)], lines) + source(SIMULATED)


def _cell(arm: dict[str, Any]) -> str:
    return f"{arm['tokens_per_s']:.0f} ({arm['gap_p95_ms']:.0f} ms)"
