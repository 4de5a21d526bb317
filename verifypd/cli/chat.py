"""`verifypd chat`: talk to a model at the terminal."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verifypd.cli import running
from verifypd.cli.flags import Command, add_engine_flags, add_sampling_flags, engine_settings, sampling_params
from verifypd.cli.running import Totals, print_stream
from verifypd.cli.terminal import clean, say
from verifypd.errors import RequestError
from verifypd.request import SamplingParams

if TYPE_CHECKING:
    from verifypd.engine.llm import LLM

CHAT_DEFAULTS: dict[str, Any] = {"max_tokens": 512, "temperature": 0.7, "top_p": 0.95}

CHAT_HELP = """\
/help           this list
/reset          forget the conversation (the system prompt stays)
/system [TEXT]  set the system prompt and start over; without TEXT, show it
/exit           leave (or Ctrl-D)
Ctrl-C stops an answer."""


def register(command: Command) -> None:
    """Add the command."""
    parser = command("chat", "talk to a model at the terminal", run, "%(prog)s [OPTION …]")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--special-tokens-in-content",
        action="store_true",
        help="let special tokens in what you write act as such; by default they are text",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no summary after an answer")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does at start")
    add_engine_flags(parser)
    add_sampling_flags(parser, CHAT_DEFAULTS)


class Chat:
    """A conversation at the terminal."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, quiet: bool, special: bool = False
    ) -> None:
        """`special`: special tokens that are spelt out act as such."""
        self.llm = llm
        self.special = special
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
            say("conversation forgotten")
        elif name == "system" and rest.strip():
            self.system = rest.strip()
            self.reset()
            say("system prompt set; conversation forgotten")
        elif name == "system":
            say(self.system or "no system prompt")
        elif name == "help":
            say(CHAT_HELP)
        else:
            say(f"no command /{name}; /help lists them")
        return True

    def answer(self, text: str) -> None:
        """Stream one answer. Ctrl-C ends it and keeps what was said."""
        self.messages.append({"role": "user", "content": text})
        begin = time.perf_counter()
        try:
            with stoppable() as stop:
                stream = self.llm.stream_chat(self.messages, self.params, special_tokens_in_content=self.special)
                final = print_stream(stream, stop=stop)
        except RequestError as error:
            self.messages.pop()
            say(f"error: {error}; /reset starts over")
            return
        if final is None:
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": final.outputs[0].text})
        totals = Totals(seconds=time.perf_counter() - begin)
        totals.add(final)
        if not self.quiet:
            say(f"[{totals.line()}]")


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


def run(args: argparse.Namespace) -> int:
    """`verifypd chat`."""
    params = sampling_params(args, CHAT_DEFAULTS)
    if params.n > 1:
        raise RequestError("chat holds one conversation; leave out --n", param="n")
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() history and editing
    with running.load(engine_settings(args)) as llm:
        chat = Chat(llm, params, args.system, quiet=args.quiet, special=args.special_tokens_in_content)
        if interactive:
            say("Type a message, or /help.")
        while True:
            try:
                line = clean(input("> " if interactive else "")).strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not interactive:
                    raise
                say("\n(Ctrl-D or /exit leaves)")
                continue
            if line.startswith("/"):
                if not chat.command(line):
                    break
            elif line:
                chat.answer(line)
    return 0
