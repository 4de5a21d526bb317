"""Drafting in a process of its own: texts, the line of tokens drafted after each, and what to do while nobody asks.

A line goes on past what was asked for: the verifier is busy, and this device has nothing else to do. When the text
goes on as the line says, the rest of the line is the next draft; when not, it is thrown away. Which of the two depends
on confirmed tokens alone, and each token comes with the distribution that it was drawn from: drafts stay exact. Knows
a drafter over slots of its own; nothing of processes or of the verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from verifypd.batch import DraftBatch, DraftSpan
from verifypd.drafters.model import ModelDrafter
from verifypd.kv.blocks import BlockPool
from verifypd.request import SamplingParams
from verifypd.runtime.inputs import BlockTables, Slots, host_tensor
from verifypd.runtime.streams import HostCopy
from verifypd.sampling.state import SamplingState

LEVEL = 128  # tokens a text may lack in the cache and still be drafted for at once; more are read while nobody asks


class Want(NamedTuple):
    """A draft that is asked for."""

    slot: int
    number: int  # of the text
    drafts: int
    temperature: float  # of the drafter, relative to the request's own
    tokens: tuple[int, ...]  # confirmed since the last time


class Offer(NamedTuple):
    """A draft: the first tokens of a line, and their distributions [count, vocab] where they were drawn."""

    slot: int
    number: int
    tokens: tuple[int, ...]
    q: tuple[Tensor, ...]
    behind: bool  # nothing is drafted before the cache has caught up
    ahead: int  # tokens of it that were there before they were asked for


@dataclass(slots=True)
class Text:
    """One request as this process knows it."""

    number: int
    tokens: list[int]  # confirmed
    drawn: bool  # whether its tokens are drawn from q; else q is not needed
    cached: int = 0  # first tokens of text and line whose keys and values are there
    line: list[int] = field(default_factory=list)  # drafted after the confirmed tokens
    q: list[Tensor] = field(default_factory=list)  # [vocab] of each, where drawn
    temperature: float = 1.0
    announced: bool = False  # whether the other side knows that it is level

    @property
    def length(self) -> int:
        """Tokens of text and line."""
        return len(self.tokens) + len(self.line)

    @property
    def lag(self) -> int:
        """Tokens that the cache lacks; the last is read when a token is drafted after it."""
        return self.length - self.cached

    def confirm(self, tokens: Sequence[int]) -> None:
        """The text goes on like this. What the line had of it stays in the cache."""
        known = len(self.tokens)
        matched = next((i for i, (a, b) in enumerate(zip(self.line, tokens, strict=False)) if a != b), None)
        matched = min(len(self.line), len(tokens)) if matched is None else matched
        self.tokens += tokens
        if matched == len(tokens):
            del self.line[:matched], self.q[:matched]
        else:
            self.cached = min(self.cached, known + matched)
            self.drop()

    def drop(self) -> None:
        """Throw the line away."""
        self.line.clear()
        self.q.clear()
        self.cached = min(self.cached, len(self.tokens) - 1)


class AheadDrafter:
    """Texts by slot. `ask` answers; `work` uses the time until the next question."""

    def __init__(
        self,
        drafter: ModelDrafter,
        slots: Slots,
        sampling: SamplingState,
        blocks: BlockPool,
        tables: BlockTables,
        eos_ids: Sequence[int],
    ) -> None:
        self.drafter = drafter
        self.slots = slots
        self.sampling = sampling
        self.blocks = blocks
        self.tables = tables
        self.eos_ids = tuple(eos_ids)
        self.texts: dict[int, Text] = {}  # by slot
        self._goals: dict[int, int] = {}  # slot -> how long its line is to become, of those in the last question
        self._most = slots.drafts.shape[1]

    def begin(self, slot: int, number: int, tokens: Sequence[int], facts: dict[str, Any]) -> None:
        """A request has this slot. facts: how its tokens are drawn."""
        self._release(slot)
        params = params_of(facts["params"])
        self.slots.assign(slot, tokens)
        self.slots.draft_temperatures[slot].fill_(1.0)
        self.sampling.assign(
            slot,
            params,
            seed=facts["seed"],
            choice=facts["choice"],
            prompt_len=facts["prompt_len"],
            max_len=facts["max_len"],
            eos_ids=self.eos_ids,
            bad_words_ids=facts["bad_words_ids"],
            acceptance=facts["acceptance"],
        )
        drawn = not params.greedy and not params.coupled(facts["acceptance"])
        self.texts[slot] = Text(number, list(tokens), drawn)

    def end(self, slot: int, number: int) -> None:
        """That request has left."""
        if slot in self.texts and self.texts[slot].number == number:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._goals.pop(slot, None)
        if self.texts.pop(slot, None) is not None:
            self.blocks.release(slot)
            self.sampling.release(slot)

    def ask(self, wants: Sequence[Want], patient: bool = False) -> list[Offer]:
        """Drafts for these texts. `patient`: who is behind is waited for, and nothing is drafted ahead afterwards."""
        wants = [want for want in wants if want.slot in self.texts and self.texts[want.slot].number == want.number]
        for want in wants:
            self._confirm(want)
        if patient:
            for want in wants:
                while self._catch_up(want.slot):
                    pass
        level = [want for want in wants if self.texts[want.slot].lag <= LEVEL and self._room(want.slot)]
        there = {want.slot: min(want.drafts, len(self.texts[want.slot].line)) for want in level}
        self._draft({want.slot: want.drafts - there[want.slot] for want in level if want.drafts > there[want.slot]})
        # the verdict's next token is guessed too, and then a draft as long as this one
        self._goals = {} if patient else {want.slot: 2 * want.drafts + 1 for want in level}
        return [self._offer(want, there.get(want.slot)) for want in wants]

    def _confirm(self, want: Want) -> None:
        text = self.texts[want.slot]
        known = len(text.tokens)
        text.confirm(want.tokens)
        if text.temperature != want.temperature:
            text.temperature = want.temperature
            self.slots.draft_temperatures[want.slot].fill_(want.temperature)
            text.drop()
        self._write(want.slot, known, want.tokens)

    def _write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Bring tokens of a text, and its length, to the device."""
        if tokens:
            self.slots.tokens[slot, start : start + len(tokens)] = host_tensor(tokens, self.slots.device)
        self.slots.lengths[slot].fill_(self.texts[slot].length)

    def _offer(self, want: Want, there: int | None) -> Offer:
        """there: tokens that were drafted ahead; None: it is behind."""
        text = self.texts[want.slot]
        text.announced = there is not None
        tokens = tuple(text.line[: want.drafts]) if text.announced else ()
        return Offer(want.slot, want.number, tokens, tuple(text.q[: len(tokens)]), not text.announced, there or 0)

    def work(self) -> bool:
        """Something useful while nobody asks: catch up, else draft ahead by a token. False: there is nothing to do."""
        behind = sorted((text.lag, slot) for slot, text in self.texts.items() if text.lag > 1 and not text.line)
        if any(self._catch_up(slot) for _, slot in behind):  # the first that can
            return True
        short = [s for s, goal in self._goals.items() if len(self.texts[s].line) < goal and self._may_go_on(s)]
        self._draft(dict.fromkeys(short, 1))
        return bool(short)

    def news(self) -> list[tuple[int, int]]:
        """Slot and number of texts that have become level since the last time."""
        found = [(s, t) for s, t in self.texts.items() if not t.announced and t.lag <= LEVEL and self._room(s)]
        for _, text in found:
            text.announced = True
        return [(slot, text.number) for slot, text in found]

    def _may_go_on(self, slot: int) -> bool:
        text = self.texts[slot]
        return text.lag <= LEVEL and text.length + 1 < self.slots.capacity and self._room(slot)

    def _room(self, slot: int) -> bool:
        """Whether there are blocks for the text and a draft; they are taken. A text that has none begins anew."""
        tokens = min(self.texts[slot].length + self._most + 1, self.slots.capacity)
        if not self.blocks.can_reserve(slot, tokens):
            if self.blocks.held.get(slot):
                self.blocks.release(slot)
                self.texts[slot].drop()
                self.texts[slot].cached = 0
            return False
        if self.blocks.reserve(slot, tokens):
            self.tables.write(slot, self.blocks.held[slot])
            self.tables.flush()
        return True

    def _catch_up(self, slot: int) -> bool:
        """Read a chunk of a text that is behind; False where it is not, or has no room."""
        text = self.texts[slot]
        rows = min(LEVEL, text.lag - 1)
        if rows <= 0 or not self._room(slot):
            return False
        self.drafter.launch(DraftBatch("model", (DraftSpan(slot, text.lag, rows, 0, text.length),)))
        text.cached += rows
        return True

    def _draft(self, counts: dict[int, int]) -> None:
        """Make lines longer by so many tokens, as far as the slots hold them."""
        most = {slot: self.slots.capacity - self.texts[slot].length for slot in counts}
        counts = {slot: min(count, self._most, most[slot]) for slot, count in counts.items() if most[slot] > 0}
        if not counts:
            return
        spans = []
        for slot, count in counts.items():
            text = self.texts[slot]
            spans.append(DraftSpan(slot, text.lag, text.lag, count, text.length + count, text.temperature))
        self.drafter.launch(DraftBatch("model", tuple(spans)))
        index = host_tensor(list(counts), self.slots.device)
        drafts = HostCopy({"drafts": self.slots.drafts[index]}).wait()["drafts"]
        for row, (slot, count) in enumerate(counts.items()):
            text, start = self.texts[slot], self.texts[slot].length
            tokens = [int(token) for token in drafts[row, :count]]
            text.cached = start + count - 1
            text.line += tokens
            if text.drawn and self.slots.draft_q is not None:
                text.q += self.slots.draft_q[slot, :count, : self.sampling.vocab].clone().unbind(0)
            self._write(slot, start, tokens)


def facts_of(request: Any, acceptance: str) -> dict[str, Any]:
    """What another process must know of a request to draw as this one does, in what JSON can say."""
    params = request.params
    named = {name: getattr(params, name) for name in DRAWN_BY if getattr(params, name) != getattr(PLAIN, name)}
    if params.logit_bias is not None:
        named["logit_bias"] = list(params.logit_bias.items())
    return {
        "params": named,
        "seed": request.seed,
        "choice": request.choice,
        "prompt_len": request.prompt_len,
        "max_len": request.max_length,
        "bad_words_ids": request.bad_words_ids,
        "acceptance": acceptance,
    }


def params_of(named: dict[str, Any]) -> SamplingParams:
    """The parameters that `facts_of` has written down."""
    if "logit_bias" in named:
        named = {**named, "logit_bias": dict(named["logit_bias"])}
    return SamplingParams(**named)


PLAIN = SamplingParams()
# Parameters that what is drafted depends on.
DRAWN_BY = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "min_tokens", "max_tokens", "stop_token_ids", "ignore_eos", "acceptance",
)  # fmt: skip
