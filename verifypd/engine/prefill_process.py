"""The process of a prefill lane that runs apart from the verifier: the same weights, and a cache for prompts only."""

from __future__ import annotations

from typing import Any

import torch

from verifypd.batch import VerifyBatch, VerifySpan
from verifypd.engine.lane_process import Place, run
from verifypd.engine.quantized import verifier_quantization
from verifypd.kv.blocks import BlockPool
from verifypd.lanes.hand_over import pack
from verifypd.lanes.verify import emitting_rows
from verifypd.models.hub import resolve
from verifypd.runtime.inputs import Slots, verify_ids, verify_layout
from verifypd.runtime.peer import LOST, READY, Inbox, Link, Message
from verifypd.runtime.runner import ModelRunner


class Prompts:
    """Reads prompts; keeps what it wrote of each until its end is read."""

    def __init__(self, runner: ModelRunner, slots: Slots, blocks: BlockPool) -> None:
        self.runner = runner
        self.slots = slots
        self.blocks = blocks
        self._read: dict[int, tuple[int, int]] = {}  # slot -> the text in it, and how much of it is read

    @torch.inference_mode()
    def read(self, message: Message) -> Message:
        """One pass over chunks; `no` where what comes before them is not here, or there is no room."""
        number, body = message.body
        [ids] = message.tensors
        if not self._room(body):
            return Message("no", number)
        spans, first = [], 0
        for slot, text, start, rows, emits in body:
            self.slots.tokens[slot, start : start + rows] = ids[first : first + rows].to(self.slots.device)
            spans.append(VerifySpan(slot, rows, drafts=0, start=start, emits=emits, context=start + rows))
            self._read[slot] = text, start + rows
            first += rows
        layout = verify_layout(spans, self.slots, self.runner.tables)
        hidden = self.runner.forward(verify_ids(spans, layout, self.slots), layout)
        batch = VerifyBatch(tuple(spans))
        tensors = pack(self.runner.cache.rows, layout.write_index, hidden, emitting_rows(batch))
        for span in spans:
            if span.emits:
                self._release(span.slot)
        return Message("kv", number, tensors)

    def _room(self, body: list[Any]) -> bool:
        """Whether every chunk follows what is here, and has blocks; prompts that nobody goes on with make room."""
        for slot, text, start, _, _ in body:
            if start == 0:
                self._release(slot)
            elif self._read.get(slot) != (text, start):
                return False
        for slot, _, start, rows, _ in body:
            if not self.blocks.can_reserve(slot, start + rows):
                for other in set(self._read) - {each[0] for each in body}:
                    self._release(other)
            if not self.blocks.can_reserve(slot, start + rows):
                return False
            if self.blocks.reserve(slot, start + rows):
                self.runner.tables.write(slot, self.blocks.held[slot])
        self.runner.tables.flush()
        return True

    def _release(self, slot: int) -> None:
        self._read.pop(slot, None)
        self.blocks.release(slot)


def make(settings: dict[str, Any]) -> Prompts:
    """The reader that the settings describe."""
    place = Place.of(settings)
    config = place.config
    source = resolve(config.model, load_format=config.load_format, hf_token=config.hf_token, revision=config.revision)
    runner, blocks = place.paged(place.load(source, verifier_quantization(config)), settings["scales"])
    return Prompts(runner, Slots(config.slots, place.capacity, 0, place.device), blocks)


def serve(prompts: Prompts, link: Link) -> None:
    """Answer until the engine is gone."""
    inbox = Inbox(lambda: link)
    link.send(Message(READY))
    while (message := inbox.get()) is not None and message.kind != LOST:
        link.send(prompts.read(message))


if __name__ == "__main__":
    run(make, serve)
