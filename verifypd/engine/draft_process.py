"""The process of a draft model that runs apart from the verifier: loads it, answers questions, drafts ahead."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import torch

from verifypd.attention.choose import backend
from verifypd.config import EngineConfig
from verifypd.drafters.ahead import AheadDrafter, Offer, Want
from verifypd.drafters.model import ModelDrafter
from verifypd.engine.build import DEFAULT_CPU_KV, draft_in_int8, pick_device, pick_dtype, read_vocab_map
from verifypd.engine.sizes import GPU_SHARE, available_bytes
from verifypd.errors import MemoryBudgetError, VerifyPDError
from verifypd.kernels.choose import select
from verifypd.kv.blocks import BlockPool
from verifypd.kv.budget import show
from verifypd.kv.pool import KVCache, block_bytes
from verifypd.models.base import Model
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model
from verifypd.runtime.inputs import BlockTables, Slots
from verifypd.runtime.padded import Drawing
from verifypd.runtime.peer import LOST, READY, Inbox, Link, Message, hello
from verifypd.runtime.runner import ModelRunner
from verifypd.sampling.choose import pick_sampler
from verifypd.sampling.state import SamplingState


def make(settings: dict[str, Any]) -> AheadDrafter:
    """The drafter that the settings describe: an engine's, and what it knows of the pair."""
    config = EngineConfig(**settings["config"])
    torch.set_num_threads(settings["threads"])
    device = pick_device(settings["device"])
    kernels = select(device, config.kernels, batch_invariant=config.batch_invariant)
    source = resolve(settings["draft"], load_format=config.load_format, hf_token=config.hf_token)
    dtype = pick_dtype(config.dtype, device, kernels)
    vocab, capacity = settings["vocab"], settings["capacity"]
    model = load_model(
        source, dtype=dtype, device=device, kernels=kernels, load_format=config.load_format,
        int8=draft_in_int8(config, kernels), max_model_len=settings["max_len"],
    )  # fmt: skip
    model.narrow = model.config.vocab_size < vocab
    slots = Slots(config.slots, capacity, config.max_draft, device, vocab)
    sampling = SamplingState(config.slots, vocab, config.max_draft, device, pick_sampler(config.sampler, device))
    count = block_count(config, model, capacity)
    cache = KVCache(
        model.config.layers, count, config.block_size, model.config.kv_heads, model.config.head_dim,
        model.activation_dtype, device,
    )  # fmt: skip
    tables = BlockTables(config.slots, capacity, config.block_size, device)
    attention = backend(config.attention, device, batch_invariant=config.batch_invariant)
    runner = ModelRunner(model, attention, cache, tables)
    drawing = Drawing(sampling, read_vocab_map(source, settings["verifier_vocab"], device))
    blocks = BlockPool(count, config.block_size, prefix_cache=False)
    return AheadDrafter(ModelDrafter(runner, slots, drawing), slots, sampling, blocks, tables, settings["eos_ids"])


def block_count(config: EngineConfig, model: Model, capacity: int) -> int:
    """Blocks for all slots, or for as many as fit beside the weights."""
    shape = model.config
    each = block_bytes(shape.layers, config.block_size, shape.kv_heads, shape.head_dim, model.activation_dtype)
    longest = -(-capacity // config.block_size)
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        room = int(free - (1 - GPU_SHARE) * total)
    else:
        room = min(DEFAULT_CPU_KV, available_bytes() // 2)
    if room < each * (longest + 1):
        raise MemoryBudgetError(
            f"the draft's cache of one request takes {show(each * (longest + 1))} and {model.device} has {show(room)}:"
            " lower --max-model-len"
        )
    return min(config.slots * longest, room // each - 1) + 1


def answer(message: Message, drafter: AheadDrafter) -> Message | None:
    """Act on what the engine says."""
    if message.kind == "begin":
        [tokens] = message.tensors
        body = message.body
        drafter.begin(body["slot"], body["number"], ids(tokens), body["facts"])
    elif message.kind == "end":
        drafter.end(*message.body)
    elif message.kind == "ask":
        [tokens] = message.tensors
        fresh, wants = ids(tokens), []
        for slot, number, drafts, temperature, count in message.body["wants"]:
            wants.append(Want(slot, number, drafts, temperature, fresh[:count]))
            fresh = fresh[count:]
        return written(drafter.ask(wants, message.body["patient"]), drafter.sampling.vocab)
    return None


def ids(tokens: torch.Tensor) -> tuple[int, ...]:
    """Token ids of a tensor on the host."""
    return tuple(int(token) for token in tokens.numpy())


def written(offers: list[Offer], vocab: int) -> Message:
    """Drafts as a message: slot, number, count, whether q comes along, whether it is behind, tokens drafted ahead; then
    tokens and q."""
    body = [[o.slot, o.number, len(o.tokens), bool(o.q), o.behind, o.ahead] for o in offers]
    tokens = torch.tensor([token for offer in offers for token in offer.tokens], dtype=torch.int64)
    rows = [row for offer in offers for row in offer.q]
    q = torch.stack(rows).to("cpu") if rows else torch.empty(0, vocab)
    return Message("drafts", body, [tokens, q])


def serve(drafter: AheadDrafter, link: Link) -> None:
    """Answer until the engine is gone; while it asks nothing, draft ahead."""
    inbox = Inbox(lambda: link)
    link.send(Message(READY))
    busy = False
    while True:
        message = inbox.get(0 if busy else None)
        if message is None:
            busy = drafter.work()
        elif message.kind == LOST:
            return
        else:
            reply = answer(message, drafter)
            if reply is not None:
                link.send(reply)
            busy = True
        if level := drafter.news():
            link.send(Message("level", level))


def main() -> None:
    """Started by `Peer`."""
    logging.basicConfig(level=logging.WARNING)
    settings, ready = hello()
    try:
        drafter = make(settings)
    except VerifyPDError as error:
        ready(str(error))
        return
    with suppress(ConnectionError):  # the engine is gone
        serve(drafter, ready(None))


if __name__ == "__main__":
    main()
