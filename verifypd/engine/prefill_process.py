"""The process of a prefill lane that runs apart from the verifier: the same weights, and a cache for prompts only."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import torch

from verifypd.attention.choose import backend
from verifypd.batch import VerifyBatch, VerifySpan
from verifypd.config import EngineConfig
from verifypd.engine.build import pick_device, pick_dtype
from verifypd.engine.draft_process import block_count
from verifypd.errors import VerifyPDError
from verifypd.kernels.choose import select
from verifypd.kv.blocks import BlockPool
from verifypd.kv.pool import KVCache
from verifypd.lanes.hand_over import pack
from verifypd.lanes.verify import emitting_rows
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.runtime.inputs import BlockTables, Slots, verify_ids, verify_layout
from verifypd.runtime.peer import LOST, READY, Inbox, Link, Message, hello
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
            spans.append(VerifySpan(slot, rows, 0, start, emits, start + rows))
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
    config = EngineConfig(**settings["config"])
    torch.set_num_threads(settings["threads"])
    device = pick_device(settings["device"])
    kernels = select(device, config.kernels, batch_invariant=config.batch_invariant)
    source = resolve(config.model, load_format=config.load_format, hf_token=config.hf_token, revision=config.revision)
    model = load_model(
        source, dtype=pick_dtype(config.dtype, device, kernels), device=device, kernels=kernels,
        load_format=config.load_format, int8=config.quantization == "int8", max_model_len=settings["max_len"],
    )  # fmt: skip
    shape, capacity = model.config, settings["capacity"]
    count = block_count(config, model, capacity)
    cache = KVCache(
        shape.layers, count, config.block_size, shape.kv_heads, shape.head_dim, model.activation_dtype, device
    )
    tables = BlockTables(config.slots, capacity, config.block_size, device)
    attention = backend(config.attention, device, batch_invariant=config.batch_invariant)
    slots = Slots(config.slots, capacity, 0, device)
    return Prompts(
        ModelRunner(model, attention, cache, tables), slots, BlockPool(count, config.block_size, prefix_cache=False)
    )


def serve(prompts: Prompts, link: Link) -> None:
    """Answer until the engine is gone."""
    inbox = Inbox(lambda: link)
    link.send(Message(READY))
    while (message := inbox.get()) is not None and message.kind != LOST:
        link.send(prompts.read(message))


def main() -> None:
    """Started by `Peer`."""
    logging.basicConfig(level=logging.WARNING)
    settings, ready = hello()
    try:
        prompts = make(settings)
    except VerifyPDError as error:
        ready(str(error))
        return
    with suppress(ConnectionError):  # the engine is gone
        serve(prompts, ready(None))


if __name__ == "__main__":
    main()
