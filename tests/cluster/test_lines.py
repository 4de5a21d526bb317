"""Lines between processes: only who was told the address gets through."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import zmq

from verifypd.cluster.lines import Presence, connect, listen


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_what_is_sent_arrives_in_order(context: zmq.Context) -> None:
    receiver, address = listen(context, "127.0.0.1")
    line = connect(context, address)
    for number in range(100):
        line.send(str(number).encode())
    assert [int(receiver.recv()) for _ in range(100)] == list(range(100))
    line.close()
    receiver.close()


def test_who_has_not_the_key_is_not_heard(context: zmq.Context) -> None:
    receiver, address = listen(context, "127.0.0.1")
    place, _, key = address.partition("#")
    plain = context.socket(zmq.PUSH)
    plain.connect(f"tcp://{place}")
    public, _ = zmq.curve_keypair()
    wrong, right = connect(context, f"{place}#{public.decode()}"), connect(context, address)
    for each, said in ((plain, b"without"), (wrong, b"with another's")):
        with contextlib.suppress(zmq.Again):  # one that was turned away already has nobody to send to
            each.send(said, zmq.NOBLOCK)
    assert key and not receiver.poll(300)
    right.send(b"with")
    assert receiver.recv() == b"with"
    for each in (plain, wrong, right):
        each.close(linger=0)
    receiver.close()


def test_a_peer_that_leaves_is_missed(context: zmq.Context) -> None:
    there = zmq.Context()
    receiver, address = listen(there, "127.0.0.1")
    line = connect(context, address)
    presence = Presence(line)
    line.send(b"hello")
    assert receiver.recv() == b"hello"
    while presence.gone():
        time.sleep(0.01)
    there.destroy(linger=0)
    while presence.gone() < 0.05:
        time.sleep(0.01)
    presence.close()
    line.close(linger=0)
