"""Running totals of one engine. Plain numbers; knows nothing of how they are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Totals since start. A token counts when the host has absorbed it."""

    steps: int = 0
    passes: int = 0  # verifier passes
    rows: int = 0  # tokens through the verifier
    prompt_tokens: int = 0  # of those, prompt tokens
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    finished: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0
