"""What the supervisor and its guardians tell each other: lines of JSON over TCP."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
from typing import Any

_LONGEST = 1 << 20  # bytes in a line; more is no message of ours
_ANSWER = 5.0  # seconds for the other side to take a message
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 10_000,
}

Message = dict[str, Any]


class Link:
    """One end of a connection; the kernel notices within ten seconds when the other host is gone.

    Args:
        connection: the connected socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_ANSWER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._pending = b""
        self.is_open = True

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; if the other end is gone, the link is closed and nothing is raised."""
        try:
            self._connection.sendall(json.dumps(message, default=str).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> list[Message]:
        """The messages that have come; call it when there is something to read."""
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data or len(self._pending) > _LONGEST:
            self.close()
            return []
        *lines, self._pending = (self._pending + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.close()
            return []
        return [message for message in messages if isinstance(message, dict)]

    def close(self) -> None:
        """End the connection. Its descriptor stays until this object goes, for selectors to forget."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def connect(host: str, port: int, token: str, **facts: Any) -> Link | None:
    """Connect to the supervisor and say who this is; None if it can't be reached."""
    try:
        connection = socket.create_connection((host, port), timeout=_ANSWER)
    except OSError:
        return None
    link = Link(connection)
    link.send(token=token, **facts)
    return link if link.is_open else None


def listen() -> socket.socket:
    """A socket that guardians of all hosts can connect to."""
    return socket.create_server(("", 0), backlog=512)


def is_welcome(message: Message, token: str) -> bool:
    """Whether a first message comes from a guardian of this job."""
    offered = str(message.get("token", "")).encode(errors="replace")
    return hmac.compare_digest(offered, token.encode())
