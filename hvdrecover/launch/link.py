"""The connections between the supervisor and its guardians: lines of JSON over TCP."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdrecover.errors import LaunchError
from hvdrecover.launch import waits
from hvdrecover.machine import SYSTEM_CLOCK, Bounded, Clock

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 10_000,
}
# Anyone can connect to the port, and guardians must always be able to.
_STRANGERS = 512  # maximum number of connections without a token yet; beyond it, the oldest is closed
_LONGEST_GREETING = 1 << 12  # bytes before the other side has sent the token
_REST = 0.2  # seconds to wait when no connection can be accepted


class Link:
    """One end of a connection; the kernel notices within ten seconds when the other host is gone."""

    def __init__(self, connection: socket.socket, patience: float = waits.MESSAGE) -> None:
        connection.settimeout(patience)  # seconds for `send`; with 0, a full send buffer closes the link
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
        """Send a message; if the other end is gone, close the link, and raise nothing."""
        try:
            line = json.dumps(message, default=str).encode() + b"\n"
            self._connection.sendall(line)  # no deadline: the socket has a timeout
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
            data = self._connection.recv(1 << 18)  # no deadline: the socket has a timeout
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
        self.received += len(data)
        messages, self._pending = decoded(self._pending + data)
        return messages

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def decoded(data: bytes) -> tuple[list[Message], bytes]:
    """Return the messages in whole lines, without invalid ones, and the beginning of the next line."""
    *lines, rest = data.split(b"\n")
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):  # anyone may have written it
            found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)], rest


def connect(host: str, port: int, token: str, **facts: Any) -> Link:
    """Connect a guardian to the supervisor; raises `LaunchError` if it does not answer."""
    with contextlib.suppress(OSError):
        connection = Bounded(waits.MESSAGE)(socket.create_connection, (host, port), timeout=waits.MESSAGE)
        link = Link(connection)
        link.send(token=token, **facts)
        if link.is_open:
            return link
    problem = f"does not answer at {host}:{port}; let all hosts of the job connect to each other"
    raise LaunchError("hvdrecover run", problem)


@dataclass
class ConnectedGuardian:
    host: str  # its host's name
    slot: int | None  # its slot on that host
    ended: bool = False  # whether it has reported its end
    done: bool = False  # whether its process has ended, and it waits until all ranks end
    leaves: bool = False  # whether its host leaves
    begun: bool = False  # whether a process of its slot has imported hvdrecover
    commit: list[int] | None = None  # generation and number of the last commit that it reported, or None
    reported: float = 0.0  # the time of its newest event, by the supervisor's clock


class Guardians:
    """Accepts guardians' connections, receives their messages, and sends them orders."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        hear: Callable[[ConnectedGuardian, Message], None],
        lost: Callable[[ConnectedGuardian], None],
        greeting: Callable[[], list[Message]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._selector = selector
        self._hear = hear  # called with each message
        self._lost = lost  # called if a connection ended without a last message
        self._greeting = greeting  # returns the first orders for a new guardian
        self._token = secrets.token_hex(16)
        self._clock = clock
        self._known: dict[Link, ConnectedGuardian] = {}
        self._strangers: dict[Link, float] = {}  # each with its deadline for the token; oldest first
        self._listener = socket.create_server(("", 0), backlog=2048)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[ConnectedGuardian]:
        return iter(list(self._known.values()))

    def address(self, host: str) -> str:
        """Return the address for ``HVDRECOVER_SUPERVISOR``: ``host/port:token``."""
        return f"{host}/{self._listener.getsockname()[1]}:{self._token}"

    def order(self, **order: Any) -> None:
        for each in list(self._known):
            each.send(**order)
            if not each.is_open:
                self._drop(each)

    def tend(self) -> None:
        """Close connections that have not sent the token in time; call it often."""
        now = self._clock.monotonic()
        for each in [each for each, due in self._strangers.items() if due <= now]:
            self._drop(each)

    def dismiss(self) -> None:
        """Close all connections, so that the remaining guardians stop."""
        for guardian in self._known.values():
            guardian.ended = True
        for each in [*self._known, *self._strangers]:
            self._drop(each)

    def close(self) -> None:
        self.dismiss()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()  # no deadline: it does not block
            new = Link(connection, patience=0.0)
        except (BlockingIOError, ConnectionAbortedError):  # the other side has closed it already
            return
        except OSError as error:  # too many open files: close the oldest connection without a token
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            else:  # the connection stays in the queue: without a pause, this is called again at once
                logger.warning("cannot accept a guardian now: %s", error.strerror)
                time.sleep(_REST)
            return
        self._strangers[new] = self._clock.monotonic() + waits.MESSAGE
        self._selector.register(new, selectors.EVENT_READ, lambda new=new: self._read(new))
        if len(self._strangers) > _STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _read(self, source: Link) -> None:
        messages = source.receive()
        if source in self._strangers and messages and self._is_welcome(messages[0]):
            # Both ends trust each other now. `hvdrecover doctor` checks that they have the same version.
            greeting = messages.pop(0)
            del self._strangers[source]
            self._known[source] = ConnectedGuardian(greeting["name"], greeting["slot"])
            for order in self._greeting():
                source.send(**order)
        if (guardian := self._known.get(source)) is not None:
            for message in messages:
                self._hear(guardian, message)
        elif messages or source.received > _LONGEST_GREETING:
            source.close()
        if not source.is_open:
            self._drop(source)

    def _is_welcome(self, greeting: Message) -> bool:
        token = str(greeting.get("token")).encode(errors="replace")
        return hmac.compare_digest(token, self._token.encode())

    def _drop(self, source: Link) -> None:
        guardian = self._known.pop(source, None)
        if guardian is None and self._strangers.pop(source, None) is None:
            return
        self._selector.unregister(source)
        source.close()
        if guardian is not None and not guardian.ended:
            self._lost(guardian)
