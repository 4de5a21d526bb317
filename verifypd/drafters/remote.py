"""A draft model in another process, as the engine sees it: a drafter that may have nothing to propose just now.

Each launch tells the process what was confirmed since the last and asks for drafts. It waits for the answer, but never
longer than a bound; without one the step verifies a token a request, as plain decoding does, and so do the next steps
until the answer is there. A process that ended, or is silent for too long, is started again and is told the texts
anew. None of this depends on a drawn token. Knows slots and messages; nothing of models.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifypd.attention.base import Reader
from verifypd.batch import DraftBatch, DraftSpan
from verifypd.drafters.ahead import LEVEL, facts_of
from verifypd.request import Request
from verifypd.runtime.inputs import Slots, host_tensor
from verifypd.runtime.peer import LOST, READY, Keeper, Message, Peer
from verifypd.runtime.streams import HostCopy

LONGEST_WAIT = 0.5  # s that a step waits for drafts at most
PATIENCE = 4.0  # times what answers usually take: so long a step waits, where that is less
SILENT = 10.0  # s after which a process that owes an answer is ended and started again


@dataclass(slots=True)
class _Told:
    """What the process knows of the text in a slot."""

    request: Request
    number: int  # texts are numbered: slots are used again
    known: int  # tokens it was told
    level: bool = False  # whether it can draft at once


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked and not answered yet."""

    number: int
    at: float  # s


class RemoteDrafter:
    """Proposes what the draft process sends. To the engine it has no cache: the other process keeps its own books."""

    name = "model"
    has_cache = False
    point_mass = False
    reader: Reader | None = None
    keeps_drafts = True
    routine = 0
    one_pass = False
    follows = False

    def __init__(
        self,
        slots: Slots,
        start: Callable[[], Peer],
        acceptance: str,
        description: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: makes the process; description: of the model in it, for the times that are kept of it."""
        self.slots = slots
        self.description = description
        self.patient = False  # while passes are timed: every answer is waited for, and nothing is drafted ahead
        self.late = 0  # questions that were not answered in time
        self.proposed = 0  # tokens
        self.ahead = 0  # of those that were drafted before they were asked for
        self.silent = SILENT
        self.wait: float | None = None  # s that a step waits for drafts; None: by what answers usually take
        self.keeper = Keeper("draft", start, clock)
        self._acceptance, self._clock = acceptance, clock
        self._told: dict[int, _Told] = {}  # by slot
        self._took: deque[float] = deque(maxlen=16)  # s of the last answers
        self._texts = 0  # begun so far
        self._questions = 0  # asked so far
        self._asked: _Question | None = None

    # -- what the engine asks -----------------------------------------------------------------------------------------

    def admitted(self, request: Request) -> None:
        """It reads the prompt while the verifier does."""
        assert request.slot is not None
        self._texts += 1
        self._told[request.slot] = _Told(request, self._texts, len(request.tokens))
        if self.keeper.ready:
            self._tell(request.slot)

    def expected(self, request: Request) -> int:
        """Nothing while the process starts, owes an answer or has not read the text; else as many as are asked for."""
        told = self._told.get(request.slot) if request.slot is not None else None
        if told is None or told.request is not request or not self.listening:
            return 0
        return self.slots.drafts.shape[1] if told.level or self.patient else 0

    @property
    def listening(self) -> bool:
        """Whether it would answer now."""
        return self.keeper.ready and self._asked is None

    @torch.inference_mode()
    def launch(self, batch: DraftBatch) -> None:
        """Ask, wait, and write what came into the slots; who gets no draft is verified without one."""
        spans = [span for span in batch.spans if span.drafts]
        if not spans:
            return
        self.slots.draft_lens[host_tensor([span.slot for span in spans], self.slots.device)] = 0
        self._look()
        spans = [span for span in spans if span.slot in self._told]
        if not spans or not self.listening:
            return
        self.keeper.send(self._question(spans))
        self._questions += 1
        self._asked = asked = _Question(self._questions, self._clock())
        until = asked.at + self._bound()
        while self._asked is asked:
            message = self.keeper.get(until - self._clock())
            if message is None:
                self.late += 1
                return
            self._take(message, write=True)

    def follow(self, spans: Sequence[DraftSpan]) -> None:
        """Nothing to read here: the process is told texts, not states."""

    def observe(self, requests: Sequence[Request]) -> None:
        """What the process has sent; tokens come with the next question."""
        if requests:
            self._look()

    def forget(self, request: Request) -> None:
        """The process may use its memory for others."""
        for slot in [slot for slot, told in self._told.items() if told.request is request]:
            told = self._told.pop(slot)
            self.keeper.send(Message("end", [slot, told.number]))

    def close(self) -> None:
        """End the process."""
        self.keeper.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _tell(self, slot: int) -> None:
        """The whole text of a slot, as the host knows it; what the device has beyond it comes with a question."""
        told = self._told[slot]
        told.known = len(told.request.tokens)
        told.level = told.known <= LEVEL  # others when it says so
        body = {"slot": slot, "number": told.number, "facts": facts_of(told.request, self._acceptance)}
        self.keeper.send(Message("begin", body, [torch.tensor(told.request.tokens)]))

    def _question(self, spans: Sequence[DraftSpan]) -> Message:
        """Which drafts are wanted, and the tokens that the process has not seen: from the device, which knows best."""
        told = [self._told[span.slot] for span in spans]
        slots = host_tensor([span.slot for span in spans], self.slots.device)
        begins = host_tensor([each.known for each in told], self.slots.device)
        width = max(span.context - span.drafts - each.known for span, each in zip(spans, told, strict=True))
        column = begins[:, None] + torch.arange(max(1, width), device=self.slots.device)
        tokens = self.slots.tokens[slots[:, None], column.clamp_max(self.slots.capacity - 1)]
        arrays = HostCopy({"tokens": tokens, "lengths": self.slots.lengths[slots]}).wait()
        wants, fresh = [], []
        for row, (span, each) in enumerate(zip(spans, told, strict=True)):
            count = int(arrays["lengths"][row]) - each.known
            each.known += count
            wants.append([span.slot, each.number, span.drafts, span.temperature, count])
            fresh.append(torch.from_numpy(arrays["tokens"][row, :count].copy()))
        return Message("ask", {"patient": self.patient, "wants": wants}, [torch.cat(fresh)])

    def _look(self) -> None:
        """Take in what has arrived, start a process where there is none, and end one that is silent."""
        while (message := self.keeper.get()) is not None:
            self._take(message)
        if self._asked is not None and self._clock() - self._asked.at > self.silent:
            self._asked = None
            self.keeper.lose(f"it has been silent for {self.silent:g} s")
        self.keeper.revive()

    def _take(self, message: Message, write: bool = False) -> None:
        """Act on a message. write: the drafts of an answer are still wanted."""
        if message.kind == LOST:
            self._asked = None
        elif message.kind == READY:
            for slot in self._told:
                self._tell(slot)
        elif message.kind == "level":
            for slot, number in message.body:
                self._set_level(slot, number, True)
        elif message.kind == "drafts" and self._asked is not None:
            self._took.append(self._clock() - self._asked.at)
            self._asked = None
            self.keeper.useful()
            for slot, number, _, _, behind, _ in message.body:
                if behind:
                    self._set_level(slot, number, False)
            if write:
                self._write(message.body, *message.tensors)

    def _set_level(self, slot: int, number: int, level: bool) -> None:
        told = self._told.get(slot)
        if told is not None and told.number == number:
            told.level = level

    def _write(self, offers: Sequence[Sequence[Any]], tokens: Tensor, q: Tensor) -> None:
        """Drafts into the slots: tokens [Σ count], q [Σ drawn, vocab]; of each offer slot, number, count, drawn, behind
        and ahead."""
        device = self.slots.device
        self.proposed += sum(offer[2] for offer in offers)
        self.ahead += sum(offer[5] for offer in offers)
        slots = [offer[0] for offer in offers for _ in range(offer[2])]
        depths = [depth for offer in offers for depth in range(offer[2])]
        drawn = [row for row, flag in enumerate(offer[3] for offer in offers for _ in range(offer[2])) if flag]
        index, depth = host_tensor(slots, device), host_tensor(depths, device)
        self.slots.drafts[index, depth] = tokens.to(device)
        self.slots.draft_lens[host_tensor([offer[0] for offer in offers], device)] = host_tensor(
            [offer[2] for offer in offers], device
        )
        if drawn and self.slots.draft_q is not None:
            rows = host_tensor(drawn, device)
            self.slots.draft_q[index[rows], depth[rows], : q.shape[1]] = q.to(device)

    def _bound(self) -> float:
        """s that a step may wait for drafts."""
        if self.patient or self.wait is not None:
            return self.silent if self.wait is None else self.wait
        return min(LONGEST_WAIT, PATIENCE * statistics.median(self._took)) if self._took else LONGEST_WAIT
