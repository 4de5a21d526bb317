"""Which states of its verifier an EAGLE-3 head was trained to read: found by trying, without an engine run for each.

A wrong choice raises no error and costs nearly all acceptance. The verifier writes a few hundred tokens, all its states
of them are kept, and the head reads them with one choice after another: the right one is where the tokens it thinks
likeliest are those that the verifier wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from verifypd.distil.dense import DenseAttention, NoCache, Places, read_features
from verifypd.distil.prompts import Prompt
from verifypd.engine.llm import LLM
from verifypd.errors import ConfigError
from verifypd.models.base import Model
from verifypd.models.eagle import Eagle3Head
from verifypd.models.eagle_config import default_states
from verifypd.models.head_loader import load_head
from verifypd.models.hub import resolve
from verifypd.progress import bar
from verifypd.request import SamplingParams

States = tuple[int, ...]
PROMPTS, TOKENS = 8, 48  # the verifier's answers, and tokens of each at most
SWEEPS = 3  # over all places, at most
SHOWN = 5  # choices in the report


@dataclass(frozen=True, slots=True)
class Sample:
    """One text with all that its verifier made of it."""

    ids: Tensor  # [T]
    states: tuple[Tensor, ...]  # hidden_states 0 to n of Hugging Face, each [T, H]; the last one not normed
    likeliest: Tensor  # [T], the verifier's next token
    first: int  # row from which on the verifier wrote the text


def search_layers(model: str, draft: str, prompts: Sequence[Prompt], settings: dict[str, Any]) -> dict[str, Any]:
    """What agreement the head has with each choice of states, best first, for JSON."""
    source = resolve(draft)
    if source.config.family != "eagle3":
        raise ConfigError(f"--search-layers is for EAGLE-3 heads: what {draft} reads is fixed")
    with LLM(model, **{**settings, "draft": None, "arch": "plain"}) as llm:
        runner = llm.engine.verify.runner
        samples = [*_samples(llm, runner.model, prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS])]
        # the ids of its config may be of another verifier or count; they are only where the search begins
        own = source.config.eagle.states if source.config.eagle else None
        usual = default_states(runner.model.config.layers)
        deepest = runner.model.config.layers
        first = tuple(max(0, min(k, deepest)) for k in own or usual)
        head = load_head(source, runner.model, states=first)
        assert isinstance(head, Eagle3Head)
        found = _Search(head, samples).run(own, usual)
    ranked = sorted(found.items(), key=lambda item: item[1], reverse=True)
    return {
        "verifier": model,
        "draft": draft,
        "configured": None if own is None else list(own),
        "usual": list(usual),
        "agreement_configured": round(found.get(own or usual, Agreement(0.0, 0.0)).share, 4),
        "tokens": sum(len(sample.ids) - sample.first for sample in samples),
        "tried": len(found),
        "best": [{"states": list(states), "agreement": round(value.share, 4)} for states, value in ranked[:SHOWN]],
    }


class Agreement(NamedTuple):
    """How well a head follows its verifier; of two choices with as many tokens the more certain one is better."""

    share: float  # of the verifier's tokens that the head thinks likeliest too
    certainty: float  # mean log-probability that the head gives those it knows of them


class _Search:
    """Tries choices of states and remembers what each was worth."""

    def __init__(self, head: Eagle3Head, samples: Sequence[Sample]) -> None:
        self.head = head
        self.samples = samples
        self.deepest = len(samples[0].states) - 1
        self.found: dict[States, Agreement] = {}

    def run(self, own: States | None, usual: States) -> dict[States, Agreement]:
        """Whole choices first, each also as other engines count; then the best with one place changed at a time."""
        places = self.head.places
        likely = [tuple(k + by for k in states) for states in (own, usual) if states for by in (0, 1, -1)]
        likely.append(tuple(round(i * self.deepest / (places + 1)) for i in range(1, places + 1)))
        with bar(total=None, desc="trying states", unit="choice") as shown:
            for states in likely:
                self._try(states, shown)
            for _ in range(SWEEPS):
                before = self._best()
                for place in range(places):
                    for k in range(self.deepest + 1):
                        best = self._best()
                        self._try((*best[:place], k, *best[place + 1 :]), shown)
                if self._best() == before:
                    break
        return self.found

    def _best(self) -> States:
        return max(self.found, key=lambda states: self.found[states])

    def _try(self, states: States, shown: Any) -> None:
        fits = len(states) == self.head.places and all(0 <= k <= self.deepest for k in states)
        if fits and states not in self.found:
            self.found[states] = agreement(self.head, self.samples, states)
            shown.update()


@torch.inference_mode()
def agreement(head: Eagle3Head, samples: Sequence[Sample], states: States) -> Agreement:
    """How well the head follows the verifier when it reads these states."""
    same, total, certain, known = 0, 0, 0.0, 0
    ids = torch.arange(head.config.vocab_size, device=head.device) if head.vocab_map is None else head.vocab_map
    row_of = torch.full((head.config.vocab_size,), -1, device=head.device)
    row_of[ids] = torch.arange(len(ids), device=head.device)
    for sample in samples:
        rows = len(sample.ids) - 1  # of positions 1 and on
        features = head.fuse([sample.states[k] for k in states])[:-1]
        places = Places(torch.arange(rows, device=head.device))
        attention: Any = DenseAttention(1, rows)
        normed, _ = head.read(sample.ids[1:], features, cast(Any, places), attention, cast(Any, NoCache()))
        first = max(0, sample.first - 1)
        logits = head.logits(normed[first:])
        wanted = row_of[sample.likeliest[1 + first :]]
        same += int((logits.argmax(-1) == wanted).sum())
        total += len(wanted)
        rows_known = (wanted >= 0).nonzero()[:, 0]
        certain += float(logits.log_softmax(-1)[rows_known, wanted[rows_known]].sum())
        known += len(rows_known)
    return Agreement(same / max(1, total), certain / max(1, known))


@torch.inference_mode()
def _samples(llm: LLM, model: Model, prompts: Sequence[Prompt]) -> Iterator[Sample]:
    tokenizer = llm.get_tokenizer()
    chat = tokenizer.chat_template.available
    asked = [
        llm.render([{"role": "user", "content": prompt.text}]) if chat else tokenizer.encode(prompt.text)
        for prompt in prompts
    ]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    for given, output in zip(asked, llm.generate(asked, params), strict=True):
        ids = torch.tensor([*given, *output.outputs[0].token_ids], device=model.device)
        hidden, captured = read_features(model, ids[None], tuple(range(model.config.layers)))
        states = (model.embed(ids), *(each[0] for each in captured))
        yield Sample(ids, states, model.logits(hidden[0]).argmax(-1), len(given) - 1)
