"""The process of a draft model that runs apart from the verifier: loads it, answers questions, drafts ahead."""

from __future__ import annotations

from typing import Any

import torch

from verifypd.drafters.ahead import AheadDrafter, Offer, Want
from verifypd.drafters.model import ModelDrafter
from verifypd.engine.build import read_vocab_map
from verifypd.engine.lane_process import Place, run
from verifypd.engine.quantized import draft_quantization
from verifypd.models.hub import resolve
from verifypd.runtime.inputs import Slots
from verifypd.runtime.padded import Drawing
from verifypd.runtime.peer import LOST, READY, Inbox, Link, Message
from verifypd.sampling.choose import pick_sampler
from verifypd.sampling.state import SamplingState


def make(settings: dict[str, Any]) -> AheadDrafter:
    """The drafter that the settings describe: an engine's, and what it knows of the pair."""
    place = Place.of(settings)
    config, device, vocab = place.config, place.device, settings["vocab"]
    source = resolve(settings["draft"], load_format=config.load_format, hf_token=config.hf_token)
    model = place.load(source, draft_quantization(config, place.kernels))
    model.narrow = model.config.vocab_size < vocab
    runner, blocks = place.paged(model)
    slots = Slots(config.slots, place.capacity, config.max_draft, device, vocab)
    sampling = SamplingState(config.slots, vocab, config.max_draft, device, pick_sampler(config.sampler, device))
    drawing = Drawing(sampling, read_vocab_map(source, vocab, device))
    drafter = ModelDrafter(runner, slots, drawing)
    return AheadDrafter(drafter, slots, sampling, blocks, runner.tables, settings["eos_ids"])


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


if __name__ == "__main__":
    run(make, serve)
