"""One-way lines between processes of a cluster: encrypted sockets over TCP. Knows ZeroMQ; nothing of what is said.

A listener's address holds its public key. Ray passes it on to those who are to know it; others cannot connect.
"""

from __future__ import annotations

import zmq

MOST_QUEUED = 10_000  # messages for a peer that does not take them


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
    socket.curve_serverkey = key.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    if ":" in host:
        socket.ipv6 = True
        host = f"[{host}]"
    socket.connect(f"tcp://{host}:{port}")
    return socket
