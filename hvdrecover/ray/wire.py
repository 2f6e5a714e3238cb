"""Connections between processes of a job that share a key: frames of bytes over TCP.

Each side proves to the other that it knows the key, without sending it. What follows is as Ray's own messages
are unless it was told to use TLS: not encrypted.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_CONNECT = 5.0  # seconds
_PROOF = 10  # seconds for the other side to prove that it knows the key
_KEEPALIVE = {  # the kernel notices within ten seconds when the other host is gone
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 10_000,
}


def connect(address: str, port: int, key: bytes) -> Connection:
    """Connect to a process that listens.

    Raises:
        OSError: it can't be reached, or does not know the key.
    """
    connection = _of(socket.create_connection((address, port), _CONNECT))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, EOFError) as error:
        connection.close()
        raise ConnectionRefusedError(f"port {port} does not know the key") from error
    _limit(connection, 0)
    return connection


def serve(address: str, key: bytes, handle: Callable[[Connection], None]) -> socket.socket:
    """Listen at a port that the system chooses, and have each connection handled in a thread of its own.

    Args:
        address: of this host.
        key: what who connects must know.
        handle: called with the connection, which is closed when it returns.

    Returns:
        The listening socket; it is closed to end.
    """
    listener = socket.create_server((address, 0), backlog=512)

    def welcome(accepted: socket.socket) -> None:
        with _of(accepted) as connection:
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                _limit(connection, 0)
                handle(connection)
            except (AuthenticationError, EOFError, OSError):
                return  # a stranger, or somebody who has gone

    def accept() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=welcome, args=(accepted,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def _of(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connection = Connection(connected.detach())
    _limit(connection, _PROOF)
    return connection


def _limit(connection: Connection, seconds: int) -> None:
    """Say how long to wait for the other side's next frame; 0 for ever."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
