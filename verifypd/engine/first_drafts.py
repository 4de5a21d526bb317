"""Says once whether a head's drafts stand as seldom as those of a head that does not fit. Knows counts and a log."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

LOOK = 1000  # drafts after which it is judged
# The built-in head has the first token of 62 to 67 % of its drafts accepted; of one EAGLE-3 head 58.9 % are reported
# with the right layers and 1.2 % with wrong ones. This lies far from both.
LEAST = 0.15


class FirstDrafts:
    """Counts the first drafts of a head."""

    def __init__(self) -> None:
        self.drafts = 0
        self.stood = 0  # drafts whose first token was accepted

    def count(self, drafted: int, accepted: int) -> None:
        """One verdict."""
        if not drafted or self.drafts >= LOOK:
            return
        self.drafts += 1
        self.stood += accepted > 0
        if self.drafts == LOOK and self.stood < LEAST * LOOK:
            log.warning(
                "of the head's %d first drafts only %.1f %% had their first token accepted, where 50 %% and more are"
                " usual: check that it was made for this very verifier; if it is an EAGLE-3 head, try --draft-layers"
                " with every id one higher or lower, or `verifypd evaluate-draft --search-layers`, which finds them",
                LOOK,
                100 * self.stood / LOOK,
            )
