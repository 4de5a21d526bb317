"""The text a draft learns from: written by the verifier, kept in shards. Knows files and token ids; no gradient.

Every shard is made from its own seed and written whole, so a run that was stopped goes on with the first one missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifypd.distil.export import whole, write_json
from verifypd.distil.generate import Generator
from verifypd.distil.prompts import Prompt, plain
from verifypd.distil.recipe import Recipe
from verifypd.errors import ConfigError
from verifypd.models.base import Model
from verifypd.progress import Bar, bar
from verifypd.tokenizer import Tokenizer

PROMPT_TOKENS = 96  # longest prompt the verifier writes itself
PROMPT_MIN_P = 0.03
RAW_TOKENS = 12  # of an answer, that a text without a template starts from
GIVEN = "given"  # kind of a prompt that the verifier did not write itself
MARK = "\u2042"  # stands for the user's words while the template is cut apart


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer, as token ids."""

    ids: np.ndarray[Any, Any]  # [T] int32
    prompt: int  # tokens of the prompt
    temperature: float
    kind: str = ""


class Deadline(Exception):  # noqa: N818  # nothing went wrong
    """Time is up; what was made is kept, and the next run goes on."""


class Writer:
    """Makes all text of a run, in order: prompts, answers, held-out answers."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        recipe: Recipe,
        folder: Path,
        check: Any = lambda: None,
    ) -> None:
        """check: called between batches; may raise Deadline."""
        self.model = model
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.folder = folder
        self.stop_ids = tuple(stop_ids)
        self.check = check
        self._generator: Generator | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def generator(self) -> Generator:
        """Made when first needed: its cache is large."""
        if self._generator is None:
            columns = self.recipe.max_prompt + self.recipe.max_new
            self._generator = Generator(self.model, self.recipe.generate_batch, columns, self.stop_ids)
        return self._generator

    def release(self) -> None:
        """Free the generator's memory."""
        self._generator = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(self, given: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
        """Everything that is not there yet."""
        self._claim(given, held_out)
        prompts = self._prompts(given, held_out)
        self._held_out("evaluation", [(self.chat(p.text), p.kind) for p in held_out])
        kept, rest = prompts[: self.recipe.validation], prompts[self.recipe.validation :]
        self._held_out("validation", [(prompt.ids.tolist(), "validation") for prompt in kept])
        self._answers(sorted(repeated(rest, self.recipe.given_share), key=len))  # little padding within a shard
        self.release()

    def chat(self, text: str) -> list[int]:
        """A user turn in the verifier's chat template, up to where the answer starts; plain text without one."""
        if not self.tokenizer.chat_template.available:
            return self.tokenizer.encode(text)
        return self.tokenizer.encode(self._render(text), add_special_tokens=False)

    def _render(self, text: str) -> str:
        return self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _prompts(self, given: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Text]:
        """Given and self-written prompts without an answer, in one shuffled order; none of them is held out."""
        path = self.folder / "prompts.npz"
        if not path.exists():
            known = {plain(prompt.text) for prompt in held_out}
            texts = [(text, "self-written") for text in self._self_written()]
            texts += [(prompt.text, GIVEN) for prompt in given]  # last: a prompt of both kinds is a given one
            unique = {plain(text): (text, kind) for text, kind in texts if plain(text) and plain(text) not in known}
            ids = [(self.chat(text), kind) for text, kind in unique.values()]
            ids = [(each, kind) for each, kind in ids if len(each) <= self.recipe.max_prompt]
            random.Random(self.recipe.seed).shuffle(ids)
            _save(path, [Text(np.array(each, np.int32), len(each), 0.0, kind) for each, kind in ids])
        prompts = load(path)
        if len(prompts) <= self.recipe.validation:
            raise ConfigError(
                f"{len(prompts)} usable prompts are too few to keep {self.recipe.validation} back: give more prompts"
            )
        return prompts

    def _self_written(self) -> list[str]:
        """The verifier continues its own template where the user would speak, and so writes what users ask."""
        count = self.recipe.self_prompts
        if not count or not self.tokenizer.chat_template.available:
            return []
        before, _, after = self._render(MARK).partition(MARK)
        opening = self.tokenizer.encode(before, add_special_tokens=False)
        if not after or len(opening) + PROMPT_TOKENS > self.generator.columns:
            return []
        limit = min(PROMPT_TOKENS, self.recipe.max_new)
        stops, texts = set(self.stop_ids), []
        batch = self.recipe.generate_batch
        shown = bar(range(-(-count // batch)), desc="prompts", unit="batches")
        for number in shown:
            self.check()
            rows = min(batch, count - number * batch)
            written = self.generator.run(
                [opening] * rows,
                [1.0] * rows,
                limit,
                seed=self._seed("prompts", number),
                min_p=PROMPT_MIN_P,
                tick=shown.update,
            )
            texts += [self.tokenizer.decode(row[:-1]).strip() for row in written if row and row[-1] in stops]
        return texts

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answers(self, prompts: list[list[int]]) -> None:
        """Answer every prompt, over and over at other temperatures, shard by shard."""
        recipe, batch = self.recipe, self.recipe.generate_batch
        shards = -(-recipe.responses // batch)
        shown = bar(range(shards), desc="answers", unit="shards")
        written = 0
        for number in shown:
            path = self.folder / f"shard-{number:04d}.npz"
            if not path.exists():
                self.check()
                _save(path, self._shard(prompts, number, shown))
            written += sum(len(text.ids) - text.prompt for text in load(path))
            shown.set_postfix_str(f"{written / 1e6:.1f} M tokens", refresh=False)

    def _shard(self, prompts: list[list[int]], number: int, shown: Bar) -> list[Text]:
        recipe, batch = self.recipe, self.recipe.generate_batch
        rows = min(batch, recipe.responses - number * batch)
        draw = random.Random(self._seed("order", number))
        raw = int(rows * recipe.raw_share) if number else 0  # they start from answers of the shard before
        numbers = range(number * batch, number * batch + rows - raw)
        chosen = [prompts[i % len(prompts)] for i in numbers]
        if raw:
            earlier = [text for text in load(self.folder / f"shard-{number - 1:04d}.npz") if text.temperature > 0]
            long = [text for text in earlier if len(text.ids) >= text.prompt + 2 * RAW_TOKENS] or earlier
            for _ in range(raw):
                text = draw.choice(long)
                answer = text.ids[text.prompt : -1].tolist()
                chosen.append(answer[: draw.randint(1, RAW_TOKENS)] or text.ids[:1].tolist())
        rounds = [i // len(prompts) for i in numbers] + [draw.randrange(len(recipe.temperatures)) for _ in range(raw)]
        temperatures = [recipe.temperatures[(i + r) % len(recipe.temperatures)] for i, r in enumerate(rounds)]
        return self._texts(chosen, temperatures, self._seed("answers", number), [""] * rows, shown)

    def _held_out(self, name: str, prompts: list[tuple[list[int], str]]) -> None:
        """Answers to held-out prompts, greedy and at temperature 0.8."""
        path = self.folder / f"{name}.npz"
        if path.exists():
            return
        usable = [(ids, kind) for ids, kind in prompts if len(ids) <= self.recipe.max_prompt]
        texts = []
        batch = self.recipe.generate_batch
        runs = [(temperature, start) for temperature in (0.0, 0.8) for start in range(0, len(usable), batch)]
        shown = bar(runs, desc=f"{name} answers", unit="batches")
        for temperature, start in shown:
            self.check()
            part = usable[start : start + batch]
            seed = self._seed(f"{name} {temperature}", start)
            kinds = [kind for _, kind in part]
            texts += self._texts([ids for ids, _ in part], [temperature] * len(part), seed, kinds, shown)
        _save(path, texts)

    def _texts(
        self, prompts: list[list[int]], temperatures: list[float], seed: int, kinds: Sequence[str], shown: Bar
    ) -> list[Text]:
        answers = self.generator.run(prompts, temperatures, self.recipe.max_new, seed=seed, tick=shown.update)
        return [
            Text(np.array(prompt + answer, np.int32), len(prompt), temperature, kind)
            for prompt, answer, temperature, kind in zip(prompts, answers, temperatures, kinds, strict=True)
            if answer
        ]

    def _seed(self, name: str, number: int) -> int:
        return random.Random(f"{self.recipe.seed} {name} {number}").getrandbits(40)

    def _claim(self, given: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
        """The folder belongs to one recipe, verifier and division of prompts: text of another is not mixed in."""
        path = self.folder / "text.json"
        sources = {"verifier": fingerprint(self.model), "prompts": _digest(given), "held_out": _digest(held_out)}
        key = json.loads(json.dumps({**self.recipe.text_key, **sources}))
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found != key:
                names = ", ".join(name for name in key if found.get(name) != key[name])
                raise ConfigError(f"{self.folder} holds text made otherwise ({names} differ): give another --out")
            return
        with whole(path) as beside:
            write_json(beside, key)


def repeated(prompts: Sequence[Text], share: float) -> list[list[int]]:
    """The ids of all prompts, given ones as often as makes them `share` of the list or more; the others once."""
    given = [prompt.ids.tolist() for prompt in prompts if prompt.kind == GIVEN]
    others = [prompt.ids.tolist() for prompt in prompts if prompt.kind != GIVEN]
    copies = math.ceil(share * len(others) / ((1 - share) * len(given))) if given else 0
    return given * max(1, copies) + others


def fingerprint(model: Model) -> str:
    """What tells one verifier from another, whatever it was loaded by: its shape and some of its weights."""
    found = hashlib.sha256(repr(model.config).encode())
    rows = model.embed(torch.arange(0, model.config.vocab_size, 97, device=model.device))
    for values in (rows, *(layer.input_norm for layer in model.layers)):
        found.update(values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def _digest(prompts: Sequence[Prompt]) -> str:
    """What tells one set of prompts from another."""
    return hashlib.sha256(json.dumps([[p.kind, p.text] for p in prompts]).encode()).hexdigest()[:16]


def load(path: Path) -> list[Text]:
    """The texts of a file."""
    with np.load(path) as file:
        ids, lengths, prompts, temperatures = (file[name] for name in ("ids", "lengths", "prompts", "temperatures"))
        kinds = file["kinds"].tolist()
    ends = np.cumsum(lengths)
    return [
        Text(ids[end - length : end].astype(np.int32), int(prompt), float(temperature), kind)
        for end, length, prompt, temperature, kind in zip(ends, lengths, prompts, temperatures, kinds, strict=True)
    ]


def load_all(folder: Path) -> list[Text]:
    """Every training text of a run."""
    return [text for path in sorted(folder.glob("shard-*.npz")) for text in load(path)]


def _save(path: Path, texts: Sequence[Text]) -> None:
    flat = np.concatenate([np.zeros(0, np.int32), *(text.ids for text in texts)])
    with whole(path) as beside, beside.open("wb") as file:
        np.savez(
            file,
            ids=flat.astype(np.uint16 if flat.max(initial=0) < 1 << 16 else np.int32),
            lengths=np.array([len(text.ids) for text in texts], np.int32),
            prompts=np.array([text.prompt for text in texts], np.int32),
            temperatures=np.array([text.temperature for text in texts], np.float32),
            kinds=np.array([text.kind for text in texts], np.str_),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of about equal length, padded at the end."""

    ids: Tensor  # [B, T] int64
    lengths: Tensor  # [B] int64, tokens that are text
    prompts: Tensor  # [B] int64, tokens of them that are prompt

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(*(x.to(device, non_blocking=True) for x in (self.ids, self.lengths, self.prompts)))


def pad(texts: Sequence[Text], multiple: int = 1) -> Batch:
    """One batch of these texts."""
    length = -(-max(len(text.ids) for text in texts) // multiple) * multiple
    ids = np.zeros((len(texts), length), np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text.ids)] = text.ids
    sizes = torch.tensor([[len(text.ids), text.prompt] for text in texts])
    return Batch(torch.from_numpy(ids), sizes[:, 0], sizes[:, 1])


def batches(texts: Sequence[Text], tokens: int, seed: int, skip: int = 0, multiple: int = 32) -> Iterator[Batch]:
    """Batches of about `tokens` tokens, without end: every round is shuffled anew, texts of like length together.

    skip: batches at the start that are left out, for a run that goes on.
    """
    epoch = 0
    while True:
        draw = np.random.default_rng([seed, epoch])
        # a little noise on the length before sorting, so that neighbours change from round to round
        lengths = np.array([len(text.ids) for text in texts])
        order = np.argsort(lengths + draw.uniform(0, multiple, len(texts)), kind="stable")
        cuts, start = [], 0
        while start < len(order):
            longest = -(-int(lengths[order[min(start + tokens // 64, len(order) - 1)]]) // multiple) * multiple
            count = max(1, tokens // max(longest, multiple))
            cuts.append(order[start : start + count])
            start += count
        for index in draw.permutation(len(cuts)):
            if skip:
                skip -= 1
                continue
            yield pad([texts[i] for i in cuts[index]], multiple)
        epoch += 1
