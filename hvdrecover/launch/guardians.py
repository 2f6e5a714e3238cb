"""The supervisor's connections to the guardians of a job."""

from __future__ import annotations

import logging
import secrets
import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.launch import link, waits
from hvdrecover.launch.link import Link, Message

logger = logging.getLogger(__name__)

_STRANGERS = 512  # maximum number of connections without a token yet; beyond it, the oldest is closed
_REST = 0.2  # seconds to wait when no connection can be accepted


@dataclass
class Guardian:
    """One guardian."""

    host: str = ""  # its host's name
    slot: int | None = None  # its slot on that host
    ended: bool = False  # whether it has reported its end
    done: bool = False  # whether its process has ended, and it waits until all ranks end
    leaves: bool = False  # whether its host leaves
    begun: bool = False  # whether a process of its slot has imported hvdrecover
    commit: list[int] | None = None  # generation and number of the last commit that it reported, or None
    reported: float = 0.0  # the time of its newest event, by the supervisor's clock


class Guardians:
    """Accepts guardians' connections, receives their messages, and sends them orders.

    Anyone can connect to the port. A connection that does not send the token within seconds is dropped. The
    number of such connections is limited, so guardians can always connect.

    Args:
        selector: wakes the supervisor.
        hear: called with each message.
        lost: called with a guardian whose connection ended without a last message.
        greeting: returns the first orders for a new guardian.
        clock: source of times.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        hear: Callable[[Guardian, Message], None],
        lost: Callable[[Guardian], None],
        greeting: Callable[[], list[Message]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._selector = selector
        self._hear = hear
        self._lost = lost
        self._greeting = greeting
        self._token = secrets.token_hex(16)
        self._clock = clock
        self._known: dict[Link, Guardian] = {}
        self._strangers: dict[Link, float] = {}  # each with its deadline for the token; oldest first
        self._listener = link.listen()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Guardian]:
        return iter(list(self._known.values()))

    @property
    def hosts(self) -> set[str]:
        """Return the hosts that have guardians now."""
        return {guardian.host for guardian in self._known.values()}

    @property
    def strangers(self) -> int:
        """Return the number of connections that have not sent the token yet."""
        return len(self._strangers)

    def address(self, host: str) -> str:
        """Return the address for ``HVDRECOVER_SUPERVISOR``: ``host/port:token``."""
        return f"{host}/{self._listener.getsockname()[1]}:{self._token}"

    def order(self, **order: Any) -> None:
        """Send an order to all guardians."""
        line = link.encode(order)
        for each in list(self._known):
            each.send_line(line)
            if not each.is_open:
                self._drop(each)

    def tend(self) -> None:
        """Close connections that have not sent the token in time. Call it often."""
        now = self._clock.monotonic()
        for each in [each for each, due in self._strangers.items() if due <= now]:
            self._drop(each)

    def dismiss(self) -> None:
        """Close all connections. The remaining guardians stop when they notice that."""
        for guardian in self._known.values():
            guardian.ended = True
        for each in [*self._known, *self._strangers]:
            self._drop(each)

    def close(self) -> None:
        """Accept no more connections."""
        self.dismiss()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
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
        for message in source.arriving():
            if source in self._known:
                self._take(self._known[source], message)
            elif source not in self._strangers or not self._welcome(source, message):
                return
        if not source.is_open:
            self._drop(source)

    def _take(self, guardian: Guardian, message: Message) -> None:
        """Handle a message. A guardian of another version may send one that must not end the supervisor."""
        try:
            self._hear(guardian, message)
        except (KeyError, TypeError, ValueError):
            text = "message of %s slot %s is malformed: is another version of hvdrecover there?"
            logger.warning(text, guardian.host, guardian.slot, exc_info=True)

    def _welcome(self, source: Link, message: Message) -> bool:
        """Check the first message of a connection; return whether it holds the job's token."""
        if not link.is_welcome(message, self._token):
            self._drop(source)
            return False
        del self._strangers[source]
        self._known[source] = Guardian(str(message.get("name", "")), message.get("slot"))
        source.known = True
        for order in self._greeting():
            source.send(**order)
        return True

    def _drop(self, source: Link) -> None:
        guardian = self._known.pop(source, None)
        if guardian is None and self._strangers.pop(source, None) is None:
            return
        self._selector.unregister(source)
        source.release()
        if guardian is not None and not guardian.ended:
            self._lost(guardian)
