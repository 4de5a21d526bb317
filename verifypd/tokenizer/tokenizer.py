"""One model's tokenizer, read from a Hugging Face folder. Knows its files; nothing of models, tensors or requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from verifypd.errors import TokenizerError
from verifypd.tokenizer.bounds import LengthBound
from verifypd.tokenizer.chat import ChatTemplate
from verifypd.tokenizer.control import ChatText, ControlTokens
from verifypd.tokenizer.detokenize import ByteStream, DetokenizeStream, Pieces, WindowStream, parse_decoder

_NONE: frozenset[int] = frozenset()


class Tokenizer:
    """Text to token ids and back.

    `eos_ids` are all ids that end a text: those of generation_config.json (config.json where that has none) and the
    tokenizer's own. `encode` adds special tokens as the model's files say; a prompt made by `apply_chat_template`
    already holds them and is encoded with `add_special_tokens=False`. `chat_text` and `encode_chat` do the same for
    conversations of people who must not write control tokens.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        add_bos: bool | None = None,  # None: as tokenizer.json has it
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,  # bos_token, eos_token ... as text, for chat templates
        where: str = "the model",
        folder: Path | None = None,  # where all this was read, for another process to read it again
    ) -> None:
        core.no_truncation()  # left in some tokenizer.json files by training scripts
        core.no_padding()
        self._core = core
        self._add_bos = add_bos
        self._vocabulary = core.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.folder = folder
        self.special_ids = frozenset(i for i, token in core.get_added_tokens_decoder().items() if token.special)
        self.chat_template = ChatTemplate(chat_templates or {}, special_tokens or {}, where)
        decoder = parse_decoder(core.decoder)
        self._pieces = Pieces(decoder, core.id_to_token) if decoder else None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and what stands beside it."""
        folder = Path(folder)
        core = _read_core(folder)
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        add_bos = config.get("add_bos_token")
        return cls(
            core,
            bos_id=_find(core, special.get("bos_token")),
            eos_ids=_eos_ids(folder, _find(core, special.get("eos_token"))),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            chat_templates=_chat_templates(folder, config),
            special_tokens=special,
            where=str(folder),
            folder=folder,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids."""
        try:
            ids: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # lone surrogates, which JSON can carry, are no text for the library
            text = text.encode("utf-8", "replace").decode()
            ids = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._add_bos is not None and self.bos_id is not None:
            ids = self._with_bos(text, ids)
        return ids

    def _with_bos(self, text: str, ids: list[int]) -> list[int]:
        """tokenizer_config.json's `add_bos_token` goes before tokenizer.json's post-processor, as in transformers."""
        assert self.bos_id is not None
        present = ids[:1] == [self.bos_id] and not text.startswith(self.token(self.bos_id))
        if self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids[1:] if present and not self._add_bos else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, the same as a stream would give. Ids outside the vocabulary leave nothing."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> DetokenizeStream:
        """A stream of the text that follows the prompt: spaces and unfinished characters join on to its end."""
        hidden = self.special_ids if skip_special_tokens else _NONE
        if self._pieces is not None:
            return ByteStream(self._pieces, hidden, prompt_ids)
        return WindowStream(lambda ids: self._core.decode(ids, skip_special_tokens), prompt_ids)

    def token(self, index: int) -> str:
        """The vocabulary's own spelling of a token; empty for ids the tokenizer does not have (padding)."""
        return self._core.id_to_token(index) or ""

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token stands for in a text; they need not be whole characters."""
        return self._pieces[index] if self._pieces is not None else self._core.decode([index], False).encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token by the vocabulary's own spelling."""
        return self._vocabulary.get(token)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Prompt text for a conversation; `tools` and any other variable of the template go in `kwargs`."""
        return self.chat_template.render(messages, add_generation_prompt, **kwargs)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> ChatText:
        """The same for `encode_chat`: control tokens spelt out in messages, tools or variables will be mere text."""

        def render(messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
            return self.apply_chat_template(messages, add_generation_prompt, **values)

        return self._control.render(render, messages, kwargs)

    def encode_chat(self, chat: ChatText, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered conversation; those of `encode` where nobody spelt out a control token."""
        if chat.mark is None:
            return self.encode(chat.text, add_special_tokens)
        ids = self._control.encode(chat, add_special_tokens)
        if add_special_tokens and self._add_bos is not None and self.bos_id is not None:
            ids = self._with_bos(self._control.shown(chat), ids)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """No encoding of the text has fewer tokens; 0 where its length says nothing."""
        return self._bound.fewest(text) if self._bound is not None else 0

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._core, self.chat_template.sources.values())

    @cached_property
    def _bound(self) -> LengthBound | None:
        return LengthBound.of(self._core, self._vocabulary)

    def difference(self, other: Tokenizer) -> str | None:
        """None if both have the same token at every id they share, else the first id where they differ.

        Sizes may differ: models of one family pad their vocabularies differently.
        """
        if self._vocabulary == other._vocabulary:
            return None
        mine, theirs = ({i: token for token, i in t._vocabulary.items()} for t in (self, other))
        for i in range(min(self.vocab_size, other.vocab_size)):
            if i in mine and i in theirs and mine[i] != theirs[i]:
                return f"token {i} is {mine[i]!r} in one and {theirs[i]!r} in the other"
        return None


def _read_core(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if any((folder / name).is_file() for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")):
            raise TokenizerError(
                f"{folder} has only a SentencePiece tokenizer; make tokenizer.json with transformers once:"
                f" AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        raise TokenizerError(f"{folder} has no tokenizer.json; copy the tokenizer files of the model there")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception for every malformed file
        text = " ".join(str(error).split())
        raise TokenizerError(
            f"{path} cannot be read ({text}); download it again, or update the tokenizers package"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise TokenizerError(f"{path} is not a JSON object; download it again")
    return raw


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as text; tokenizer_config.json goes before special_tokens_map.json."""
    found: dict[str, str] = {}
    for source in (special_map, config):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _find(core: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else core.token_to_id(token)


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    value = _read_json(folder / "generation_config.json").get("eos_token_id")
    if value is None:
        raw = _read_json(folder / "config.json")
        text = raw.get("text_config")
        value = (text if isinstance(text, dict) else raw).get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    ids = [own, *(i for i in listed if isinstance(i, int) and not isinstance(i, bool))]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A chat_template.jinja file goes before tokenizer_config.json, as in transformers."""
    source = config.get("chat_template")
    if source is None:
        source = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # [{"name": "default", "template": ...}, ...]
        templates = {str(entry["name"]): str(entry["template"]) for entry in source}
    else:
        templates = {"default": source} if isinstance(source, str) else {}
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates
