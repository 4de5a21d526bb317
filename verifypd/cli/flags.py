"""Flags from the fields of EngineConfig and SamplingParams, so that a setting has one name everywhere."""

from __future__ import annotations

import argparse
import re
import shutil
import types
import typing
from collections.abc import Callable, Container, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol

from verifypd.cli.terminal import BAD_INPUT, say
from verifypd.config import EngineConfig, flag
from verifypd.errors import ConfigError, RequestError
from verifypd.hints import advice
from verifypd.request import SamplingParams

# Prefix of the engine's settings in the namespace: some names are a request's too.
ENGINE = "engine_"
# A setting of both the engine and a request: the command runs one engine for one user, so the engine's flag is enough.
ENGINE_OWNED = ("max_draft", "draft_temperature", "acceptance", "slo_ttft", "slo_tpot")
# Requests own --seed; the engine's default seed is named apart.
ENGINE_FLAGS = {"seed": "--engine-seed"}
# The command prints text, so it always detokenises.
NOT_FLAGS = ("detokenize", "token_origins")

SAMPLING_HELP = {
    "n": "choices per prompt",
    "temperature": "0 takes the most likely token at each step",
    "top_p": "smallest set of tokens with this much probability",
    "top_k": "this many most likely tokens; 0 or -1: off",
    "min_p": "tokens at least this likely relative to the most likely one",
    "seed": "makes the text repeatable, and acceptance 'coupled' unless --acceptance says otherwise",
    "presence_penalty": "taken off the logit of every token already in the output",
    "frequency_penalty": "taken off once for each time a token is in the output",
    "repetition_penalty": "divides the logits of tokens in prompt and output; 1: off",
    "logit_bias": "added to a token's logit; may be repeated",
    "allowed_token_ids": "only these token ids, comma-separated",
    "bad_words": "text that must not appear; may be repeated",
    "min_tokens": "no end before this many tokens",
    "max_tokens": "output tokens at most",
    "stop": "text that ends the output; may be repeated",
    "stop_token_ids": "token ids that end the output, comma-separated",
    "ignore_eos": "go on past the end-of-text token",
    "logprobs": "log-probabilities of this many alternatives per output token (with --json)",
    "prompt_logprobs": "the same for prompt tokens (with --json)",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop_str_in_output": "keep the stop text in the output",
    "speculation": "draft tokens for this request",
    "priority": "lower runs first",
    "deadline_ms": "end with what there is after so many ms",
}


Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag that a file may give too: where it lands in the namespace, and what type it has."""

    dest: str
    hint: Any


class Parser(argparse.ArgumentParser):
    """Reports bad input in one line, with the name that was probably meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings: dict[str, Setting] = {}  # by name in a file: the flag's, with _ for -

    def error(self, message: str) -> NoReturn:
        """Print the message and leave."""
        say(f"error: {message}{_meant(message)} (see '{self.prog} --help')")
        raise SystemExit(BAD_INPUT)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Leave because of arguments that no flag takes."""
        options = {option for action in self._actions for option in action.option_strings}
        known = {option.lstrip("-").replace("-", "_") for option in options}
        first = next((each.partition("=")[0] for each in unknown if each.startswith("-")), None)
        hint = advice(first, known, flag) if first is not None else ""
        if first is None and "--model" in options:
            hint = f"; did you mean --model {unknown[0]}?"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def refuse_given(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse flags that would do nothing here. names: as they are in the namespace; a default is not refused."""
    parser: Parser = args.parser
    given = [name for name in names if getattr(args, name, None) not in (None, [], parser.get_default(name))]
    if given:
        options = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
        raise ConfigError(f"{why}: leave out {', '.join(options[name] for name in given)}")


def _meant(message: str) -> str:
    """The choice that is nearest to what argparse did not find among them."""
    match = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    near = get_close_matches(match[1], re.findall(r"[\w.+-]+", match[2]), n=1) if match else []
    return f"; did you mean {near[0]!r}?" if near else ""


class Command(Protocol):
    """Adds one command to the parser: its name, a line of help, and what runs it."""

    def __call__(self, name: str, text: str, run: Run, usage: str | None = None) -> Parser:
        """The parser of the command."""
        ...


def wide(prog: str) -> argparse.HelpFormatter:
    """Help as wide as the terminal, up to 120 columns."""
    return argparse.HelpFormatter(prog, max_help_position=34, width=min(120, shutil.get_terminal_size().columns))


def _ids(text: str) -> list[int]:
    try:
        return parse_ids(text)
    except RequestError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID=BIAS") from None


def parse_ids(text: str) -> list[int]:
    """Token ids of a prompt given as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"{text[:60]!r} is not a comma-separated list of numbers") from None


# Flags that are not one plain value.
LIST_FLAGS: dict[str, dict[str, Any]] = {
    "logit_bias": {"type": _bias, "action": "append", "metavar": "ID=BIAS"},
    "allowed_token_ids": {"type": _ids, "metavar": "IDS"},
    "stop_token_ids": {"type": _ids, "metavar": "IDS"},
    "bad_words": {"type": str, "action": "append", "metavar": "TEXT"},
    "stop": {"type": str, "action": "append", "metavar": "TEXT"},
}


def _plain(hint: Any) -> type:
    """The type a flag's text is read as: int | None is an int, a union with str a str."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = [t for t in typing.get_args(hint) if t is not type(None)] if union else [hint]
    return options[0] if len(options) == 1 and options[0] in (bool, int, float, str) else str


def add_flag(
    parser: Parser, group: Any, name: str, hint: Any, default: Any, text: str, *, option: str, **extra: Any
) -> None:
    """One flag. Nothing lands in the namespace unless the user gives it, so that every default has one home."""
    parser.settings[option.lstrip("-").replace("-", "_")] = Setting(name, hint)
    if text is not argparse.SUPPRESS:
        shown = default is not None and default is not False and "default" not in text
        text = (f"{text} (default: {default})" if shown else text).replace("%", "%%")
    kind = _plain(hint)
    if name in LIST_FLAGS:
        extra = LIST_FLAGS[name] | extra
    elif kind is bool:
        extra["action"] = argparse.BooleanOptionalAction
    else:
        extra["type"] = kind
        if not extra.get("choices"):
            extra.setdefault("metavar", {int: "N", float: "X"}.get(kind, option.rpartition("-")[2].upper()))
    group.add_argument(option, dest=name, default=argparse.SUPPRESS, help=text, **extra)


def add_engine_flags(parser: Parser, without: Container[str] = ()) -> None:
    """One flag for every field of EngineConfig, but those that the command has no use for; and `--config`."""
    group = parser.add_argument_group("model and engine")
    text = "YAML file of settings, by the names of these flags with _ for -; a flag overrides it"
    group.add_argument("--config", metavar="FILE", help=text)
    hints = typing.get_type_hints(EngineConfig)
    for f in fields(EngineConfig):
        if f.name in without:
            continue
        meta = dict(f.metadata)
        text = argparse.SUPPRESS if meta.get("hidden") else meta["help"]
        extra = {key: meta[key] for key in ("choices", "metavar") if meta.get(key)}
        option = meta.get("flag") or ENGINE_FLAGS.get(f.name) or flag(f.name)
        add_flag(parser, group, ENGINE + f.name, hints[f.name], f.default, text, option=option, **extra)


def add_sampling_flags(parser: Parser, defaults: dict[str, Any]) -> None:
    """One flag for every field of SamplingParams that a terminal has a use for."""
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    for f in fields(SamplingParams):
        if f.name in ENGINE_OWNED or f.name in NOT_FLAGS:
            continue
        default = defaults.get(f.name, None if f.default is MISSING else f.default)
        add_flag(parser, group, f.name, hints[f.name], default, SAMPLING_HELP[f.name], option=flag(f.name))


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine settings the user gave."""
    return {name.removeprefix(ENGINE): value for name, value in vars(args).items() if name.startswith(ENGINE)}


def sampling_params(args: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """SamplingParams from the flags the user gave over the command's defaults."""
    given = {name: value for name, value in vars(args).items() if name in SamplingParams.names()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if hasattr(args, "engine_acceptance"):  # asked for by name: it holds for a seeded request too
        given["acceptance"] = args.engine_acceptance
    return SamplingParams(**defaults | given)
