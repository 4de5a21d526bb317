"""Sets draft lengths. A choice may depend on tokens already confirmed and on load, never on a drawn draft token."""

from __future__ import annotations

from typing import Protocol

from verifypd.control.snapshot import RequestView


class Controller(Protocol):
    """Chooses how many tokens a request drafts next."""

    name: str

    def draft_length(self, view: RequestView) -> int:
        """Tokens to draft for this request in the next step; 0 is a choice like any other."""
        ...


class FixedController:
    """Always asks for the same length, cut to what the drafter can give and the request may still emit."""

    name = "fixed"

    def __init__(self, length: int) -> None:
        self.length = length

    def draft_length(self, view: RequestView) -> int:
        """`length`, unless the request or its drafter allows less. One token is left for the correction or bonus."""
        return max(0, min(self.length, view.draft_limit, view.promise, view.room - 1))
