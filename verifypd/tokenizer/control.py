"""Keeps control tokens that a client merely spells out apart from those a chat template writes. Knows no requests.

Before a conversation is rendered, every control token in what the client sent is replaced by digits nobody can guess.
Those still spelt out in the rendered text are the template's own. They are renamed, the digits become the client's
text again, and a twin of the tokenizer that knows control tokens by their new names only encodes it all at once.

Why so: the library itself splits, normalises and merges the whole text, so what stands around such a spelling has the
ids it has without it. Encoding pieces one by one would not do that (a Metaspace puts its mark before the first piece
alone), and marks around all content would disturb templates that trim it or look at how it begins. Digits in place of
a token survive trimming, changes of case, JSON and use in several places, and cut in two they are still no token. A
conversation without such spellings takes the usual way.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from verifypd.errors import RequestError

_TAG = re.compile(r"[<\[].+[>\]]", re.DOTALL)
_PLACE = 6  # digits that say which token stood here
_MARK = 24  # digits of a mark


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered conversation; `mark` stands before the number of every token that its author only spelt out."""

    text: str
    mark: str | None = None


class ControlTokens:
    """The control tokens of one tokenizer: its special ones, and tags that are tokens and stand in its template.

    The second kind (`<tool_response>`) is text for anybody but the assistant, whose words come back as it wrote them;
    and not even that where the template itself looks for it in the content and so gives it a meaning there.
    """

    def __init__(self, core: tokenizers.Tokenizer, templates: Iterable[str]) -> None:
        self._core = core
        self._added = core.get_added_tokens_decoder()
        source = "\n".join(templates)
        special = {token.content for token in self._added.values() if token.special}
        tags = {t.content for t in self._added.values() if _TAG.fullmatch(t.content) and t.content in source}
        self._tokens = sorted(special | tags)
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._special = finder(special)
        self._control = finder(special | tags)
        self._is_special = special.__contains__

    def render(
        self, render: Callable[..., str], messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> ChatText:
        """The text of a conversation by `render(messages, **values)`, in which no client's spelling is a token."""
        text = None
        for control in (self._control, self._special):
            mark, taken = _digits(_MARK), set[str]()
            try:
                told = [
                    self._hide(message, self._special if message.get("role") == "assistant" else control, mark, taken)
                    for message in messages
                ]
                others = self._hide(values, control, mark, taken)
            except RecursionError:
                raise RequestError("the conversation is nested too deeply", param="messages") from None
            if not taken:
                break
            hidden = ChatText(render(told, **others), mark)
            if all(map(self._is_special, taken)):
                return hidden
            text = text or render(messages, **values)
            if self._shown(hidden.text, mark) == text:
                return hidden
        return ChatText(text or render(messages, **values))

    def encode(self, chat: ChatText, add_special_tokens: bool) -> list[int]:
        """Token ids of a text with marks."""
        assert chat.mark is not None
        renamed = self._template_tokens.sub(self._rename, chat.text)
        text = self._shown(renamed, chat.mark).encode("utf-8", "replace").decode()
        ids = [self._id(index) for index in self._twin.encode(text, add_special_tokens=False).ids]
        before, after = self._around if add_special_tokens else ([], [])
        return [*before, *ids, *after]

    def shown(self, chat: ChatText) -> str:
        """A rendered conversation as people read it."""
        return chat.text if chat.mark is None else self._shown(chat.text, chat.mark)

    def _hide(self, value: Any, control: re.Pattern[str], mark: str, taken: set[str]) -> Any:
        """A copy of a value of JSON with control tokens replaced; `taken` gets those there were."""
        if isinstance(value, str):

            def replace(match: re.Match[str]) -> str:
                taken.add(match[0])
                return f"{mark}{self._numbers[match[0]]:0{_PLACE}d}"

            return control.sub(replace, value)
        if isinstance(value, Mapping):
            return {
                self._hide(name, control, mark, taken): self._hide(each, control, mark, taken)
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hide(each, control, mark, taken) for each in value]
        return value

    def _shown(self, text: str, mark: str) -> str:
        def token(match: re.Match[str]) -> str:
            number = int(match[1])
            return self._tokens[number] if number < len(self._tokens) else match[0]

        return re.sub(rf"{mark}(\d{{{_PLACE}}})", token, text)

    def _rename(self, match: re.Match[str]) -> str:
        return match[0] + self._secret if match[0] in self._numbers else match[0]

    def _id(self, index: int) -> int:
        known = self._ids.get(index)
        if known is None and index in self._control_ids:  # the vocabulary itself joins the letters to the token
            spelt = self._core.id_to_token(index)
            raise RequestError(f"the text holds {spelt!r}, which this model cannot read as text", param="messages")
        return index if known is None else known

    @cached_property
    def _secret(self) -> str:
        return _digits(_MARK)

    @cached_property
    def _template_tokens(self) -> re.Pattern[str]:
        return finder({token.content for token in self._added.values()})  # as the library finds them: the longest

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(index for index, token in self._added.items() if token.content in self._numbers)

    @cached_property
    def _twin(self) -> tokenizers.Tokenizer:
        """The same model and the same steps, other names for control tokens. The vocabulary is shared, not copied.

        The library builds its search anew with every call that adds tokens, so there are two calls for thousands.
        """
        twin = tokenizers.Tokenizer(self._core.model)
        if self._core.normalizer is not None:
            twin.normalizer = self._core.normalizer
        if self._core.pre_tokenizer is not None:
            twin.pre_tokenizer = self._core.pre_tokenizer
        twin.add_special_tokens([self._renamed(token) for token in self._added.values() if token.special])
        twin.add_tokens([self._renamed(token) for token in self._added.values() if not token.special])
        return twin

    def _renamed(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        same = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        return tokenizers.AddedToken(self._name(token.content), **same)

    def _name(self, token: str) -> str:
        return token + self._secret if token in self._numbers else token

    @cached_property
    def _ids(self) -> dict[int, int]:
        """Ids of the tokenizer by those of the twin, for added tokens."""
        found = ((self._twin.token_to_id(self._name(token.content)), index) for index, token in self._added.items())
        return {theirs: index for theirs, index in found if theirs is not None}

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after any text."""
        probe = self._core.encode("a", add_special_tokens=True)
        own = [place for place, added in enumerate(probe.special_tokens_mask) if not added]
        return (probe.ids[: own[0]], probe.ids[own[-1] + 1 :]) if own else ([], [])


def _digits(count: int) -> str:
    return f"{secrets.randbelow(10**count):0{count}d}"


def finder(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of these words at the first place there is one, in time linear in the text."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_branches(tree) if tree else r"(?!)")


def _branches(node: dict[str, Any]) -> str:
    """The pattern of what may follow."""
    ends = "" in node
    ways = [_chain(letter, after) for letter, after in node.items() if letter]
    if not ways:
        return ""
    joined = ways[0] if len(ways) == 1 and not ends else f"(?:{'|'.join(ways)})"
    return f"{joined}?" if ends else joined


def _chain(letter: str, node: dict[str, Any]) -> str:
    """A run of letters without a choice, then what may follow it."""
    run = re.escape(letter)
    while len(node) == 1 and "" not in node:
        [(letter, node)] = node.items()
        run += re.escape(letter)
    return run + _branches(node)
