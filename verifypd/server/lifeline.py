"""What a child process owes its parent: it ends when the parent does, and leaves signals to it. Knows Linux."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import NoReturn

from verifypd.errors import VerifyPDError

log = logging.getLogger(__name__)

BAD_SETTINGS = 2  # exit status: starting it again would not help
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # they ask a server to end; SIGHUP: its terminal is gone
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with(parent: int) -> None:
    """Be killed when `parent`, which started this process, ends; end at once when it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def obey_parent(name: str) -> None:
    """Leave it to the parent when this process ends. `name`, of 15 characters at most, is what `ps` and `top` show."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    _prctl(_PR_SET_NAME, name.encode())


@contextlib.contextmanager
def stops_blocked() -> Iterator[None]:
    """What is started meanwhile has these signals blocked until it obeys its parent: Ctrl-C goes to all processes of a
    terminal, also to those that are still importing."""
    resource_tracker.ensure_running()  # `start` would start it, and lift the block with that
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def give_up(error: VerifyPDError) -> NoReturn:
    """End because of settings or files that will never do, and say which in one line."""
    log.error("%s", " ".join(str(error).split()))
    sys.exit(BAD_SETTINGS)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
