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

from hvdrecover.bounded import Bounded
from hvdrecover.launch import waits

Message = dict[str, Any]

LONGEST = 1 << 18  # bytes in a message that is sent; texts of longer ones are cut

_LONGEST = 1 << 20  # bytes in a line that is received; a longer one is skipped
_LONGEST_GREETING = 1 << 12  # the same, before the other side has said the token
_CUTS = (1 << 15, 1 << 11, 1 << 7)  # characters of a text that are kept; the largest that makes a message fit
_ENTRIES = 1 << 7  # for so many characters, one entry of a list or an object is kept
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
        self._skips = False
        self.is_open = True
        self.known = known

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; if the other end is gone, the link is closed and nothing is raised."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Send a message that is encoded."""
        try:
            self._connection.sendall(line)
        except OSError:
            self.close()

    @property
    def has_room(self) -> bool:
        """Return whether the kernel takes a message now, so that `send` does not wait for the other side."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self) -> list[Message]:
        """The messages that have come; call it when there is something to read."""
        return list(self.arriving())

    def arriving(self) -> Iterator[Message]:
        """Yield messages one by one, as the first one may set `known`."""
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            message = None if self._skips else self._read(line)
            self._skips = False
            if not self.is_open:
                return
            if isinstance(message, dict):
                yield message
        self._bound()

    def _bound(self) -> None:
        """Skip a line that is too long, or close the link."""
        if self._skips or len(self._pending) > (_LONGEST if self.known else _LONGEST_GREETING):
            self._skips, self._pending = True, b""
            if not self.known:
                self.close()

    def _read(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            if not self.known:
                self.close()
            return None

    def close(self) -> None:
        """End the connection. Its descriptor stays until `release`, for selectors to forget."""
        self.is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """End the connection, and give its descriptor back."""
        self.close()
        self._connection.close()


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the line of a message. Of a message that is too long, each text keeps its beginning and end."""
    line = _line(message)
    for most in _CUTS:
        if len(line) <= LONGEST:
            break
        line = _line(_cut(message, most))
    return line


def _line(message: object) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str) and len(value) > most:
        return f"{value[: most // 4]}\n… {len(value) - most} characters …\n{value[-most * 3 // 4 :]}"
    if isinstance(value, Mapping):
        return {key: _cut(each, most) for key, each in list(value.items())[: max(64, most // _ENTRIES)]}
    if isinstance(value, (list, tuple)):
        return [_cut(each, most) for each in value[: max(2, most // _ENTRIES)]]
    return value


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
    """A socket that guardians of all hosts can connect to."""
    return socket.create_server(("", 0), backlog=2048)


def is_welcome(message: Message, token: str) -> bool:
    """Return whether a first message comes from a guardian of this job."""
    offered = message.get("token")
    return isinstance(offered, str) and hmac.compare_digest(offered.encode(errors="replace"), token.encode())
