"""The guardians of a job, as its supervisor sees them."""

from __future__ import annotations

import secrets
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdrecover.launch import link
from hvdrecover.launch.link import Link, Message


@dataclass
class Guardian:
    """One guardian.

    Attributes:
        host: its host's name.
        slot: its place there.
        ended: whether it has said that it goes.
        commit: generation and number of the last commit that it told of, or None.
    """

    host: str = ""
    slot: int | None = None
    ended: bool = False
    commit: list[int] | None = None


class Guardians:
    """Takes guardians' connections, hears what they tell, and hands on orders.

    Args:
        selector: wakes the supervisor.
        hear: called with each message.
        lost: called with a guardian that is gone without a word.
        greeting: gives the orders for a guardian that has just come.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        hear: Callable[[Guardian, Message], None],
        lost: Callable[[Guardian], None],
        greeting: Callable[[], list[Message]],
    ) -> None:
        self._selector = selector
        self._hear = hear
        self._lost = lost
        self._greeting = greeting
        self._token = secrets.token_hex(16)
        self._known: dict[Link, Guardian | None] = {}
        self._listener = link.listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __len__(self) -> int:
        return len(self._known)

    def address(self, host: str) -> str:
        """How guardians find their supervisor, for the environment.

        Args:
            host: this host's name, for guardians that Horovod tells none.
        """
        return f"{host}/{self._listener.getsockname()[1]}:{self._token}"

    def order(self, **order: Any) -> None:
        """Hand an order on to all."""
        for each in list(self._known):
            each.send(**order)
            if not each.is_open:
                self._drop(each)

    def dismiss(self) -> None:
        """Close all connections; guardians that are left then stop."""
        for each, guardian in list(self._known.items()):
            if guardian is not None:
                guardian.ended = True
            self._drop(each)

    def close(self) -> None:
        """Take no more connections."""
        self.dismiss()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        new = Link(connection)
        self._known[new] = None
        self._selector.register(new, selectors.EVENT_READ, lambda: self._read(new))

    def _read(self, source: Link) -> None:
        for message in source.receive():
            guardian = self._known.get(source)
            if guardian is not None:
                self._hear(guardian, message)
            elif not self._welcome(source, message):
                return
        if not source.is_open:
            self._drop(source)

    def _welcome(self, source: Link, message: Message) -> bool:
        """Take the first message of a connection; whether it comes from a guardian of this job."""
        if not link.is_welcome(message, self._token):
            self._drop(source)
            return False
        self._known[source] = Guardian(str(message.get("name", "")), message.get("slot"))
        for order in self._greeting():
            source.send(**order)
        return True

    def _drop(self, source: Link) -> None:
        if source not in self._known:
            return
        guardian = self._known.pop(source)
        self._selector.unregister(source)
        source.close()
        if guardian is not None and not guardian.ended:
            self._lost(guardian)
