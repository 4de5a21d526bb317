"""Which of two drafters proposes for a request next: look-up or model, by expected gain. Host side, a few counts each.

Unbiased by construction: the choice rests on confirmed tokens and on counts of drafts that were judged, never on a
token that a drafter has drawn. Knows requests; nothing of tensors, plans or clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from verifypd.request import Request

ROW, STEP = 0.03, 0.1  # until costs are known: a further row in a verifier pass and a step of the model, in passes
MEMORY = 24.0  # trials a mean looks back
STRENGTH = 3.0  # trials that what is known of others counts for
SHORT, LONG = 0, 1  # whether the shortest suffix that may be looked up has occurred before, or the longest
PRIOR = (0.3, 0.75)  # chance that a look-up predicts the next token, before anything is known


@dataclass(slots=True)
class Chance:
    """A running mean of trials, pulled to a prior."""

    prior: float
    stood: float = 0.0
    trials: float = 0.0

    def learn(self, stood: int, trials: int, memory: float = MEMORY) -> None:
        """Add trials; old ones fade."""
        keep = max(0.0, 1.0 - trials / memory)
        self.stood = self.stood * keep + stood
        self.trials = self.trials * keep + trials

    @property
    def mean(self) -> float:
        """Chance of the next trial."""
        return (self.stood + STRENGTH * self.prior) / (self.trials + STRENGTH)


def gain(chance: float, longest: int, price: float) -> tuple[float, int]:
    """Tokens per verifier pass' worth of time with the best draft of up to `longest` tokens, and its length.

    `price`: what a further token of a draft costs, in passes.
    """
    best, length, alive, tokens = 1.0, 0, 1.0, 1.0
    for drafted in range(1, longest + 1):
        alive *= chance
        tokens += alive
        value = tokens / (1.0 + drafted * price)
        if value > best:
            best, length = value, drafted
    return best, length


class Copying:
    """How often one request's text went on as it did after the latest earlier occurrence of the same tokens.

    Counted at every output token, whoever drafted it or nobody: look-up is judged without being used.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = (shortest, longest)
        self._follows: tuple[dict[tuple[int, ...], int], ...] = ({}, {})  # n-gram -> where its continuation stands
        self._chances = tuple(Chance(prior) for prior in PRIOR)
        self._length = 0
        self._match: tuple[int, int] | None = None  # SHORT or LONG, and where the predicted token stands
        self._heard = [[0, 0], [0, 0]]  # of each kind trials that stood, and all, since they were last counted
        self._counted = (0, 0)

    def extend(self, tokens: list[int], prompt_len: int) -> None:
        """Take in what was appended to `tokens` since the last call."""
        if not self._length:
            self._read_prompt(tokens[: prompt_len - 1])
        match, kinds = self._match, tuple(enumerate(zip(self._sizes, self._follows, strict=True)))
        for end in range(self._length + 1, len(tokens) + 1):
            if match is not None and end > prompt_len:
                kind, place = match
                stood = tokens[place] == tokens[end - 1]
                self._chances[kind].learn(stood, 1)
                self._heard[kind][0] += stood
                self._heard[kind][1] += 1
            match = None
            for kind, (size, follows) in kinds:
                if end < size:
                    break
                gram = tuple(tokens[end - size : end])
                if place := follows.get(gram, 0):
                    match = kind, place
                follows[gram] = end
        self._match, self._length = match, len(tokens)

    def heard(self, worthwhile: Callable[[float], bool]) -> tuple[int, int]:
        """Look-ups that the text has borne out so far, of how many: of the kinds whose chance was such that they would
        have been made."""
        stood, trials = self._counted
        for chance, (good, all_of_them) in zip(self._chances, self._heard, strict=True):
            if all_of_them and worthwhile(chance.mean):
                stood, trials = stood + good, trials + all_of_them
        self._heard, self._counted = [[0, 0], [0, 0]], (stood, trials)
        return stood, trials

    def _read_prompt(self, tokens: list[int]) -> None:
        """A prompt but for its last token, at once: nothing is judged there, and only the latest place counts."""
        for size, follows in zip(self._sizes, self._follows, strict=True):
            grams = zip(*(tokens[start:] for start in range(size)), strict=False)  # the shortest ends it
            follows.update(zip(grams, range(size, len(tokens) + 1), strict=False))
        self._length = len(tokens)

    @property
    def chance(self) -> float | None:
        """That a looked-up token stands; None where there is nothing to look up."""
        return None if self._match is None else self._chances[self._match[0]].mean


class Pick(NamedTuple):
    """Who proposes for a request next."""

    drafter: str
    longest: int  # tokens, at most
    lookups: tuple[int, int]  # that the text so far has borne out, of those worth making


@dataclass(slots=True)
class _Known:
    """What is known of one request."""

    copying: Copying
    drafting: Chance
    pick: Pick  # the latest


class Choice:
    """Picks `copier` or `model` for each request and step."""

    def __init__(self, copier: str, model: str, shortest: int, longest: int) -> None:
        self.copier, self.model = copier, model
        self._sizes = (shortest, longest)
        self.row, self.step = ROW, STEP  # prices in verifier passes; whoever knows the costs sets them
        self._everyone = Chance(0.6)
        self._requests: dict[int, _Known] = {}  # by order
        self._nothing = Pick(model, 0, (0, 0))

    def decide(self, request: Request, limit: int, able: bool = True) -> Pick:
        """Who proposes next, and how much, by what is confirmed now. `able`: whether the model can draft for it."""
        known = self._requests.get(request.order)
        if known is None:
            drafting = Chance(self._everyone.mean)
            known = self._requests[request.order] = _Known(Copying(*self._sizes), drafting, self._nothing)
        known.copying.extend(request.tokens, request.prompt_len)
        name, longest = self.model, limit if able else 0
        own, _ = gain(known.drafting.mean, longest, self.row + self.step)

        def copied(chance: float) -> int:
            """Tokens to look up at this chance; 0 where the model is better."""
            value, length = gain(chance, limit, self.row)
            return length if value >= own else 0

        lookups = known.copying.heard(lambda chance: copied(chance) > 0)
        chance = known.copying.chance
        if chance is not None and (length := copied(chance)):
            name, longest = self.copier, length
        known.pick = Pick(name, longest, lookups)
        return known.pick

    def pick(self, order: int) -> Pick:
        """As decided last for a request; nothing of the model where nobody has asked. Reading changes nothing."""
        known = self._requests.get(order)
        return self._nothing if known is None else known.pick

    def observe(self, order: int, drafter: str | None, drafted: int, accepted: int) -> None:
        """A draft was judged. Look-ups are counted from the text alone."""
        known = self._requests.get(order)
        if known is None or drafter != self.model or not drafted:
            return
        trials = min(drafted, accepted + 1)
        known.drafting.learn(accepted, trials)
        self._everyone.learn(accepted, trials, 16 * MEMORY)

    def forget(self, order: int) -> None:
        """The request has left."""
        self._requests.pop(order, None)
