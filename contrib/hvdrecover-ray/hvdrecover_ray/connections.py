"""TCP connections between processes of one job, for frames of bytes.

Both sides prove that they know the job's key, without sending it. The frames are not encrypted. Ray does not
encrypt its own messages either, unless it is told to use TLS.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 10  # for the other side to prove that it knows the key
_KEEPALIVE = {  # the kernel notices a lost host within ten seconds
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 10_000,
}


def connect(address: str, port: int, key: bytes) -> Connection:
    """Connect to a process that called `serve`.

    Raises:
        OSError: the process cannot be reached, or has another key.
    """
    connection = _connection(socket.create_connection((address, port), _CONNECT_SECONDS))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, EOFError) as error:
        connection.close()
        raise ConnectionRefusedError(f"port {port} has another key") from error
    _set_receive_timeout(connection, 0)
    return connection


def serve(address: str, key: bytes, handle: Callable[[Connection], None]) -> socket.socket:
    """Listen at a port that the system chooses, and handle each connection in its own thread.

    Args:
        address: address of this host.
        key: key that both sides must know.
        handle: called with each connection. The connection closes when the call returns.

    Returns:
        The listening socket. Close it to stop.
    """
    listener = socket.create_server((address, 0), backlog=512)

    def welcome(accepted: socket.socket) -> None:
        with _connection(accepted) as connection:
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
                _set_receive_timeout(connection, 0)
                handle(connection)
            except (AuthenticationError, EOFError, OSError):
                return  # a stranger, or the other side is gone

    def accept() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:  # the listener is closed
                return
            threading.Thread(target=welcome, args=(accepted,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def _connection(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connection = Connection(connected.detach())
    _set_receive_timeout(connection, _HANDSHAKE_SECONDS)
    return connection


def _set_receive_timeout(connection: Connection, seconds: int) -> None:
    """Set how long to wait for the next frame; 0 waits without limit."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
