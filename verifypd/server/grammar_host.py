"""Processes that follow output formats: one that knows the tokenizer, and a child of it for each format.

A child compiles its format and makes the masks of every request that has it, within a limit of memory. Whoever asks
measures its time and may have it killed: nothing else is lost with it. Knows llguidance; nothing of slots or tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from verifypd.server.lifeline import die_with, obey_parent
from verifypd.server.messages import GrammarSpec

STACK = 64 << 20  # bytes, of the thread that compiles: it recurses along the format
FUEL = 100_000  # for expanding a regular expression; llguidance's own 1,000,000 takes a second and 170 MB
PROBE = 4  # tokens read to see whether a format can be followed
NICE = 5  # of the thread that compiles: no step waits for it


class Setting(msgspec.Struct, frozen=True, array_like=True):
    """What the tokenizer's process is started with."""

    folder: str
    vocab: int
    eos_ids: list[int]
    memory: int  # bytes a format may take
    parent: int


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """For the masks of a span: `output` was confirmed since the last one, `drafts` may follow it."""

    request: int  # one that is not known yet has read nothing
    output: list[int]
    drafts: list[int]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """A request has ended."""

    request: int


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """One mask a row, as far as the drafts fit; none after `error`."""

    request: int
    rows: list[bytes]  # bit t % 8 of byte t // 8: token t may come next
    error: str | None


class Compiled(msgspec.Struct, frozen=True, array_like=True):
    """Whether a format can be followed."""

    error: str | None


def source(spec: GrammarSpec) -> str:
    """llguidance's own form of a format; ValueError when it is none."""
    if spec.kind == "json":
        return LLMatcher.grammar_from_json_schema(spec.text)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(regex_to_lark(spec.text, "dws"))  # \d, \w and \s mean ASCII
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in json.loads(spec.text)))
    return LLMatcher.grammar_from_lark(spec.text)


def load_tokenizer(folder: str, vocab: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer of a model's folder, as llguidance knows it."""
    text = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=vocab, eos_token=list(eos_ids))


def compile_format(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """A matcher that has read nothing, of a format that some text can follow; ValueError says why there is none.

    Reading a format may be quick and following it not: the first tokens expand it.
    """
    fresh = LLMatcher(tokenizer, source(spec), log_level=0, limits=LLParserLimits(initial_lexer_fuel=FUEL))
    probe = fresh.deep_copy()
    for _ in range(PROBE):
        if probe.is_stopped():
            break
        probe.try_consume_tokens([_first(probe.compute_bitmask())])
    if probe.is_error():
        raise ValueError(_reason(probe, ours=spec.kind == "tool"))
    return fresh


def _first(mask: bytes) -> int:
    """The first token a mask allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


class Matcher:
    """Follows one output.

    llguidance gives up on a text that takes too much work, and never recovers. Where that happens on a draft that is
    taken back again, the matcher is made anew and reads what stands once more.
    """

    def __init__(self, fresh: LLMatcher) -> None:
        """`fresh` has read nothing; it stays so."""
        self._fresh = fresh
        self._inner = fresh.deep_copy()
        self._read: list[int] = []
        self._over = False  # it gave up on what stands
        self.error: str | None = None

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> Iterator[bytes]:
        """Read what was confirmed; then the mask before each draft and after the last, as far as the drafts fit.

        After an error no mask follows. Drafts are taken back when the walk is over.
        """
        if self._over:
            return
        self._advance(output)
        walked = 0
        for token in (*drafts, None):
            mask = self._mask()
            if mask is None:
                self._over = not walked
                break
            yield mask
            if token is None:
                break
            if self._advance([token]):
                walked += 1
            elif self._inner.is_error() or not (self._inner.is_stopped() and _allows(mask, token)):
                break  # only ends follow an end that is ignored
        self._rollback(walked)

    def _advance(self, tokens: Sequence[int]) -> int:
        """Take tokens as far as they fit; returns how many did."""
        taken: int = self._inner.try_consume_tokens(list(tokens))
        self._read += tokens[:taken]
        return taken

    def _rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if count:
            del self._read[-count:]
        if self._inner.is_error():
            self._inner = self._fresh.deep_copy()
            self._inner.try_consume_tokens(self._read)
        elif count:
            self._inner.rollback(count)

    def _mask(self) -> bytes | None:
        """Which tokens may come next: only the end of a whole text; None after an error."""
        mask: bytes = self._inner.compute_bitmask()
        if self._inner.is_error():
            self.error = _reason(self._inner)
            return None
        return mask


def _reason(matcher: LLMatcher, ours: bool = False) -> str:
    """`ours`: nobody else has seen the grammar, so its lines say nothing."""
    text = matcher.get_error().partition("<state>")[0]
    if ours:
        text = re.sub(r"^at \d+\(\d+\): ", "", re.split(r"\n\s*\d+ \| ", text, maxsplit=1)[0])
    return " ".join(text.split())[:300]


# -- the processes ----------------------------------------------------------------------------------------------------


def follow(line: Connection, tokenizer: LLTokenizer) -> None:
    """A child's life: compile the format that comes first, then answer until nobody asks."""
    spec = msgspec.msgpack.decode(line.recv_bytes(), type=GrammarSpec)
    try:
        fresh = _aside(lambda: compile_format(tokenizer, spec))
    except ValueError as error:
        line.send_bytes(msgspec.msgpack.encode(Compiled(" ".join(str(error).split())[:300])))
        return
    line.send_bytes(msgspec.msgpack.encode(Compiled(None)))
    decoder = msgspec.msgpack.Decoder(Ask | Drop)
    matchers: dict[int, Matcher] = {}
    while True:
        message = decoder.decode(line.recv_bytes())
        if isinstance(message, Drop):
            matchers.pop(message.request, None)
            continue
        matcher = matchers.get(message.request) or matchers.setdefault(message.request, Matcher(fresh))
        rows = list(matcher.masks(message.output, message.drafts))
        line.send_bytes(msgspec.msgpack.encode(Masks(message.request, rows, matcher.error)))


def _aside(work: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of `work`, done by a thread of low priority with a large stack."""

    def lower() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    threading.stack_size(STACK)
    with ThreadPoolExecutor(1, initializer=lower) as thread:
        return thread.submit(work).result()


class Nursery:
    """The process that knows the tokenizer. Its children have it too, without reading it again."""

    def __init__(self, line: socket.socket, setting: Setting) -> None:
        self.line = line
        self.setting = setting
        self.tokenizer = load_tokenizer(setting.folder, setting.vocab, setting.eos_ids)
        self.children: set[int] = set()

    def run(self) -> None:
        """Bear and kill children as told, until nobody is left to tell."""
        while True:
            order, given, *_ = socket.recv_fds(self.line, 16, 1)
            if not order:
                return
            self._reap()
            if given:
                self.line.sendall(self._bear(given[0]).to_bytes(8, "little"))
            else:
                self._kill(int.from_bytes(order, "little"))

    def _bear(self, descriptor: int) -> int:
        """Its number; 0 where there can be none."""
        try:
            child = os.fork()
        except OSError:  # no memory, or too many processes
            os.close(descriptor)
            return 0
        if not child:
            try:
                self.line.close()
                _limit(self.setting.memory)
                with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
                    follow(Connection(descriptor), self.tokenizer)
            finally:
                os._exit(0)
        os.close(descriptor)
        self.children.add(child)
        return child

    def _kill(self, child: int) -> None:
        """Its number cannot have passed to another process: nobody else buries it, and that comes later."""
        if child in self.children:
            os.kill(child, signal.SIGKILL)

    def _reap(self) -> None:
        while self.children:
            child, _ = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            self.children.discard(child)


def _limit(memory: int) -> None:
    """Hold this process to `memory` bytes more than it has, and let it die with its parent."""
    die_with(os.getppid())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory + STACK, used + memory + STACK))


def main(descriptor: int) -> None:
    """Entry of the tokenizer's process: says whether it can read the tokenizer, then waits for orders."""
    obey_parent("verifypd-format")
    line = socket.socket(fileno=descriptor)
    setting = msgspec.msgpack.decode(line.recv(1 << 16), type=Setting)
    die_with(setting.parent)
    try:
        nursery = Nursery(line, setting)
    except Exception as error:  # noqa: BLE001  # the library raises what it likes
        line.sendall(" ".join(f"no: {error}".split())[:300].encode())
        return
    line.sendall(b"ready")
    with contextlib.suppress(ConnectionError):
        nursery.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
