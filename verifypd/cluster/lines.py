"""One-way lines between processes of a cluster: encrypted sockets over TCP. Knows ZeroMQ; nothing of what is said.

A listener's address holds its public key. Ray passes it on to those who are to know it; others cannot connect.
"""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

MOST_QUEUED = 10_000  # messages for a peer that does not take them
HEARTBEAT, SILENT = 2_000, 10_000  # ms between two signs of life, and without any until a peer is taken for gone


def listen(context: zmq.Context, host: str) -> tuple[zmq.Socket, str]:
    """A socket to receive on, and its address."""
    public, secret = zmq.curve_keypair()
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.linger = 0
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = public, secret
    port = socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
    return socket, f"{host}:{port}#{public.decode()}"


def connect(context: zmq.Context, address: str) -> zmq.Socket:
    """A socket to send on; sending with NOBLOCK raises zmq.Again once the peer has taken nothing for long."""
    place, _, key = address.partition("#")
    host, _, port = place.rpartition(":")
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(MOST_QUEUED)
    socket.linger = 200  # ms
    socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT, SILENT
    socket.curve_serverkey = key.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    if ":" in host:
        socket.ipv6 = True
        host = f"[{host}]"
    socket.connect(f"tcp://{host}:{port}")
    return socket


class Presence:
    """Whether the peer of a socket is there. Belongs to the thread that the socket belongs to."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._gone: float | None = time.monotonic()  # s, since when

    def gone(self) -> float:
        """s for which it has not been there; 0: it is."""
        while self._events.poll(0):
            if recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._gone = None
            elif self._gone is None:
                self._gone = time.monotonic()
        return 0.0 if self._gone is None else time.monotonic() - self._gone

    def close(self) -> None:
        """Look no more."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
