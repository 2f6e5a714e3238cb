"""The connection of the supervisor and its guardians: lines of JSON over TCP.

A guardian first sends the job's token. Then both ends trust each other: they have the same version, which
`hvdrecover doctor` checks. A connection without the token may send few bytes; invalid ones close it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from hvdrecover.clock import Bounded
from hvdrecover.launch import waits

Message = dict[str, Any]

_LONGEST_GREETING = 1 << 12  # bytes of a line, before the other side has sent the token
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
        known: whether the other side has sent the token. Its invalid messages are skipped; those of others
            close the link.
    """

    def __init__(
        self, connection: socket.socket, patience: float = waits.MESSAGE, *, known: bool = False
    ) -> None:
        connection.settimeout(patience)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._pending = b""
        self.is_open = True
        self.known = known

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. If the other end is gone, close the link, and raise nothing."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Send an encoded message."""
        try:
            self._connection.sendall(line)
        except OSError:
            self.close()

    @property
    def has_room(self) -> bool:
        """Return whether `send` would not block, because the kernel has room for a message."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. Call it when the socket is readable."""
        return list(self.arriving())

    def arriving(self) -> Iterator[Message]:
        """Yield messages one by one, as the first one may set `known`."""
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            message = _decoded(line)
            if message is not None:
                yield message
            elif not self.known:
                self.close()
            if not self.is_open:
                return
        if not self.known and len(self._pending) > _LONGEST_GREETING:
            self.close()

    def close(self) -> None:
        """End the connection. Its descriptor stays until `release`, for selectors to forget."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """End the connection, and close its descriptor."""
        self.close()
        self._connection.close()


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message, default=str).encode() + b"\n"


def _decoded(line: bytes) -> Message | None:
    """Return the message in a line; None if the line is not valid."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def connect(host: str, port: int, token: str, **facts: Any) -> Link | None:
    """Connect to the supervisor and send the token; None if it does not answer."""
    try:
        connection = Bounded(waits.MESSAGE)(socket.create_connection, (host, port), timeout=waits.MESSAGE)
    except OSError:
        return None
    link = Link(connection, known=True)
    link.send(token=token, **facts)
    return link if link.is_open else None


def listen() -> socket.socket:
    """Return a socket that guardians of all hosts can connect to."""
    return socket.create_server(("", 0), backlog=2048)


def is_welcome(message: Message, token: str) -> bool:
    """Return whether a first message comes from a guardian of this job."""
    offered = message.get("token")
    return isinstance(offered, str) and hmac.compare_digest(offered.encode(errors="replace"), token.encode())
