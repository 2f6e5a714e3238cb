"""The connection of the supervisor and its guardians: lines of JSON over TCP.

A guardian first sends the job's token. Then both ends trust each other: they have the same version, which
`hvdrecover doctor` checks.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from typing import Any

from hvdrecover.clock import Bounded
from hvdrecover.launch import waits

Message = dict[str, Any]

_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 10_000,
}


class Link:
    """One end of a connection; the kernel notices within ten seconds when the other host is gone.

    Args:
        connection: the connected socket.
        patience: seconds for the other side to accept a message; with 0, a full send buffer closes the link.
    """

    def __init__(self, connection: socket.socket, patience: float = waits.MESSAGE) -> None:
        connection.settimeout(patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._pending = b""
        self.received = 0  # bytes
        self.is_open = True

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. If the other end is gone, close the link, and raise nothing."""
        try:
            self._connection.sendall(json.dumps(message, default=str).encode() + b"\n")
        except OSError:
            self.close()

    @property
    def has_room(self) -> bool:
        """Return whether `send` would not block, because the kernel has room for a message."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without invalid ones; call it when there is input."""
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
        self.received += len(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [message for line in lines if (message := _decoded(line)) is not None]

    def close(self) -> None:
        """End the connection. Its descriptor stays until `release`, for selectors to forget."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self.close()
        self._connection.close()


def _decoded(line: bytes) -> Message | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def connect(host: str, port: int, token: str, **facts: Any) -> Link | None:
    try:
        connection = Bounded(waits.MESSAGE)(socket.create_connection, (host, port), timeout=waits.MESSAGE)
    except OSError:
        return None
    link = Link(connection)
    link.send(token=token, **facts)
    return link if link.is_open else None
