"""Writing to a terminal: what every command shares. Knows nothing of commands or engines."""

from __future__ import annotations

import signal
import sys

BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE


def emit(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def clean(text: str) -> str:
    """Bytes of the command line that are not UTF-8 become replacement characters, which a tokenizer can take."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
