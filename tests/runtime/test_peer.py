"""A process and the messages to and from it: what arrives, and how each end of the two is noticed by the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from verifypd.runtime.peer import LOST, Keeper, Message, Peer

PARENT = """
import sys, time
from verifypd.runtime.peer import Peer
if __name__ == "__main__":
    peer = Peer("tests.runtime.echo", {})
    assert peer.inbox.get(60).kind == "ready"
    print(peer.process.pid, flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
def test_messages_arrive_as_they_were_and_a_loss_is_told() -> None:
    keeper = Keeper("test", lambda: Peer("tests.runtime.echo", {}))
    try:
        keeper.wait_ready()
        assert keeper.peer is not None and not keeper.peer._store.parent.exists(), "nothing is left behind"
        tensors = [torch.arange(5), torch.rand(300, 1000), torch.empty(0, 7), torch.ones(2, 2, dtype=torch.bfloat16)]
        keeper.send(Message("a kind", {"b": [1, None, "ü"]}, tensors))
        message = keeper.get(60.0)
        assert message is not None and message[:2] == ("a kind", {"b": [1, None, "ü"]})
        assert all(torch.equal(a, 2 * b) for a, b in zip(message.tensors, tensors, strict=True))
        assert keeper.get(0.01) is None and keeper.ready and keeper.peer is not None
        keeper.peer.process.kill()
        message = keeper.get(60.0)
        assert message is not None and message.kind == LOST and not keeper.ready
        keeper.send(Message("nobody", None))
        keeper.revive()  # at once: it had been of no trouble before
        assert keeper.restarts == 1 and keeper.peer is not None
        keeper.lose("it is asked to")
        keeper.revive()
        assert keeper.restarts == 1 and keeper.peer is None, "and after a pause where that did not help"
    finally:
        keeper.close()


@pytest.mark.slow
def test_it_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
