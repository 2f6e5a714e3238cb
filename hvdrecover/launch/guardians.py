"""The guardians of a job, as its supervisor sees them."""

from __future__ import annotations

import logging
import secrets
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.launch import link, waits
from hvdrecover.launch.link import Link, Message

logger = logging.getLogger(__name__)

_STRANGERS = 512  # connections that have not said yet whose they are; more push the oldest out
_AT_ONCE = 64  # connections that are taken before others are heard again
_REST = 0.2  # seconds until connections are taken again, when none can be


@dataclass
class Guardian:
    """One guardian.

    Attributes:
        host: its host's name.
        slot: its place there.
        ended: whether it has said that it goes.
        commit: generation and number of the last commit that it reported, or None.
        unclear: whether it has sent a message that cannot be read.
    """

    host: str = ""
    slot: int | None = None
    ended: bool = False
    commit: list[int] | None = None
    unclear: bool = False


class Guardians:
    """Takes guardians' connections, hears what they send, and hands on orders.

    Anybody who reaches the port can connect. Who does not say the token within seconds, or sends something
    else, is dropped, and so many are held at most that guardians can always come.

    Args:
        selector: wakes the supervisor.
        hear: called with each message.
        lost: called with a guardian that is gone without a word.
        greeting: gives the orders for a guardian that has just come.
        clock: where times come from.
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
        self._strangers: dict[Link, float] = {}  # and when they are dropped; the oldest come first
        self._rests_until: float | None = None
        self._warned = False
        self._listener = link.listen()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def hosts(self) -> set[str]:
        """Return the hosts that have guardians now."""
        return {guardian.host for guardian in self._known.values()}

    @property
    def strangers(self) -> int:
        """Return how many connections have not said yet whose they are."""
        return len(self._strangers)

    def address(self, host: str) -> str:
        """Return how guardians find their supervisor, for the environment.

        Args:
            host: this host's name, for guardians that Horovod tells none.
        """
        return f"{host}/{self._listener.getsockname()[1]}:{self._token}"

    def order(self, **order: Any) -> None:
        """Hand an order on to all."""
        line = link.encode(order)
        for each in list(self._known):
            each.send_line(line)
            if not each.is_open:
                self._drop(each)

    def tend(self) -> None:
        """Drop strangers whose time is over, and take connections again; to be called every now and then."""
        now = self._clock.monotonic()
        for each in [each for each, due in self._strangers.items() if due <= now]:
            self._drop(each)
        if self._rests_until is not None and self._rests_until <= now:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def dismiss(self) -> None:
        """Close all connections; guardians that are left then stop."""
        for guardian in self._known.values():
            guardian.ended = True
        for each in [*self._known, *self._strangers]:
            self._drop(each)

    def close(self) -> None:
        """Take no more connections."""
        self.dismiss()
        if self._rests_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
                new = Link(connection, patience=0.0)
            except (BlockingIOError, ConnectionAbortedError):  # it has gone again
                return
            except OSError as error:  # too many open files, no memory: it would come again and again
                self._make_room(error)
                return
            self._strangers[new] = self._clock.monotonic() + waits.MESSAGE
            self._selector.register(new, selectors.EVENT_READ, lambda new=new: self._read(new))
            if len(self._strangers) > _STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _make_room(self, error: OSError) -> None:
        """Drop the stranger that has been silent for longest; without any, take no connections for now."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))
            return
        if not self._warned:
            self._warned = True
            logger.warning("no guardian can be taken now: %s", error.strerror)
        self._selector.unregister(self._listener)
        self._rests_until = self._clock.monotonic() + _REST

    def _read(self, source: Link) -> None:
        for message in source.arriving():
            if source in self._known:
                self._take(self._known[source], message)
            elif source not in self._strangers or not self._welcome(source, message):
                return
        if not source.is_open:
            self._drop(source)

    def _take(self, guardian: Guardian, message: Message) -> None:
        """Hear a message. One guardian of another version must not end the supervisor."""
        try:
            self._hear(guardian, message)
        except (KeyError, TypeError, ValueError):
            if not guardian.unclear:
                guardian.unclear = True
                text = "message of %s slot %s is malformed: is another version of hvdrecover there?"
                logger.warning(text, guardian.host, guardian.slot, exc_info=True)

    def _welcome(self, source: Link, message: Message) -> bool:
        """Take the first message of a connection; return whether it comes from a guardian of this job."""
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
