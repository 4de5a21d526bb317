"""The prefill lane in a process of its own: it reads prompts with weights of its own and hands over the keys and values
it wrote. The verdict on the first token is made here, like any other.

A chunk runs here where the process cannot take it: it starts, it lacks what comes before the chunk (a shared prefix, a
request that was preempted), or somebody wants logprobs of the prompt. A chunk whose process is lost, or silent for too
long, runs here, too: nothing is lost but time. Knows passes and messages; nothing of requests or of scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifypd.batch import VerifyBatch
from verifypd.lanes.verify import PassResult, VerifyLane, emitting_rows
from verifypd.runtime.inputs import host_tensor, verify_ids, verify_layout
from verifypd.runtime.peer import LOST, Keeper, Message, Peer
from verifypd.runtime.streams import HostCopy, Ticket

SILENT = 30.0  # s after which a process that owes a pass is ended, started again, and the pass runs here


class PrefillProcess:
    """Hands prompt chunks to a process, one pass at a time."""

    def __init__(
        self, lane: VerifyLane, start: Callable[[], Peer], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lane = lane
        self.keeper = Keeper("prefill", start, clock)
        self.silent = SILENT
        self.handed_over = 0  # prompt tokens whose keys and values came from the process
        self._clock = clock
        self._read: dict[int, tuple[int, int]] = {}  # slot -> the text in it, and how much of that the process has read
        self._passes = 0
        self._waiting: _Away | None = None

    def launch(self, batch: VerifyBatch, texts: list[int]) -> Ticket | None:
        """Start a pass over chunks there; texts: a number for each span's request. None: it must run here."""
        self.look()
        if not self.keeper.ready or self._waiting is not None or not self._takes(batch, texts):
            return None
        body, self._passes = [], self._passes + 1
        for span, text in zip(batch.spans, texts, strict=True):
            start = span.start or 0
            self._read[span.slot] = text, start + span.rows
            body.append([span.slot, text, start, span.rows, span.emits])
        slots = self.lane.slots
        layout = verify_layout(batch.spans, slots, self.lane.runner.tables)
        ids = HostCopy({"ids": verify_ids(batch.spans, layout, slots)}).wait()["ids"]
        self.keeper.send(Message("read", [self._passes, body], [torch.from_numpy(ids)]))
        self._waiting = away = _Away(self, self._passes, self._clock())
        return Ticket(batch, away, lambda _: self._finish(batch, away.answer))

    def _takes(self, batch: VerifyBatch, texts: list[int]) -> bool:
        both = zip(batch.spans, texts, strict=True)
        follows = all(not span.start or self._read.get(span.slot) == (text, span.start) for span, text in both)
        return follows and all(span.prompt_logprobs < 0 for span in batch.spans)

    def look(self) -> None:
        """Take in what has arrived, end a process that is silent, and start one where there is none."""
        while (message := self.keeper.get()) is not None:
            self._take(message)
        if self._waiting is not None and self._clock() - self._waiting.at > self.silent:
            self.keeper.lose(f"it has been silent for {self.silent:g} s")
            self._drop()
        self.keeper.revive()

    def wait(self) -> None:
        """Until what is out is here, or will not come."""
        while self._waiting is not None:
            message = self.keeper.get(max(1e-3, self._waiting.at + self.silent - self._clock()))
            if message is None:
                self.look()
            else:
                self._take(message)

    def _take(self, message: Message) -> None:
        if message.kind == LOST:
            self._drop()
        elif message.kind in ("kv", "no") and self._waiting is not None and message.body == self._waiting.number:
            self._waiting.answer = message if message.kind == "kv" else None
            self._waiting.over, self._waiting = True, None
            self.keeper.useful()

    def _drop(self) -> None:
        """What the process has read is gone; what was out runs here."""
        self._read.clear()
        if self._waiting is not None:
            self._waiting.over, self._waiting = True, None

    @torch.inference_mode()
    def _finish(self, batch: VerifyBatch, answer: Message | None) -> PassResult:
        """Keys and values into the verifier's cache, and the verdict; or the whole pass, where nothing came."""
        lane, hidden = self.lane, None
        if answer is None:
            for span in batch.spans:
                self._read.pop(span.slot, None)
        else:
            kv, last = answer.tensors
            layout = verify_layout(batch.spans, lane.slots, lane.runner.tables)
            lane.runner.cache.rows[:, :, layout.write_index] = kv.to(lane.slots.device)
            hidden = torch.zeros(batch.rows, last.shape[1], dtype=last.dtype, device=lane.slots.device)
            hidden[host_tensor(emitting_rows(batch), lane.slots.device)] = last.to(lane.slots.device)
            self.handed_over += batch.rows
        result: PassResult = lane.launch(batch, replay=False, hidden=hidden).result()
        return result

    def close(self) -> None:
        """End the process."""
        self.keeper.close()
        self._drop()


class _Away:
    """A pass that runs in the process."""

    def __init__(self, process: PrefillProcess, number: int, at: float) -> None:
        self.number, self.at = number, at
        self.answer: Message | None = None
        self.over = False  # whether the answer is here, or will never be
        self._process = process

    def done(self) -> bool:
        """Whether it is over; never waits."""
        if not self.over:
            self._process.look()
        return self.over

    def wait(self) -> dict[str, np.ndarray[Any, Any]]:
        """Until it is over; what came lies in `answer`."""
        if not self.over:
            self._process.wait()
        return {}


def pack(cache_rows: Tensor, write_index: Tensor, hidden: Tensor, rows: list[int]) -> list[Tensor]:
    """What a pass hands over: keys and values of its rows [layers, 2, N, heads, dim], hidden states of some."""
    return [cache_rows[:, :, write_index].to("cpu"), hidden[host_tensor(rows, hidden.device)].to("cpu")]
