"""The supervisor's end of the connections to guardians."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.launch import ends, link
from hvdrecover.launch.link import ConnectedGuardian, Guardians, Link, Message
from tests.unit.launch.children import until

FAULT: Message = {
    "kind": "fault",
    "fault": "crash",
    "message": "rank 3 on h2: crash",
    "end": "crash",
    "exit": -9,
    "detail": "SIGKILL",
    "commit": [1, 2],
    "point": [2, 0],
}


@dataclass
class Supervisor:
    """Serves guardians as the supervisor does, and keeps their messages."""

    greeting: list[Message] = field(default_factory=lambda: [{"order": "know", **ends.known([])}])
    heard: list[tuple[str, int | None, Message]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    clock: Any = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.guardians = Guardians(self.selector, self._hear, self._lost, lambda: self.greeting, self.clock)

    def _hear(self, guardian: ConnectedGuardian, message: Message) -> None:
        self.heard.append((guardian.host, guardian.slot, message))
        guardian.ended = message.get("kind") == "end"

    def _lost(self, guardian: ConnectedGuardian) -> None:
        self.lost.append(guardian.host)

    def serve(self, until_then: Callable[[], object], what: str) -> None:
        """Serve until something is so."""

        def turn() -> object:
            for key, _ in self.selector.select(0.05):
                key.data()
            return until_then()

        until(turn, what)

    def settle(self) -> None:
        """Serve what there is."""
        while found := self.selector.select(0):
            for key, _ in found:
                key.data()

    @property
    def address(self) -> tuple[str, int, str]:
        host, _, rest = self.guardians.address("127.0.0.1").rpartition("/")
        port, _, token = rest.partition(":")
        return host, int(port), token

    def close(self) -> None:
        if self.selector.get_map():
            self.guardians.close()
        self.selector.close()


def come(supervisor: Supervisor, name: str = "h1", slot: int = 0) -> Link:
    """A guardian that has come and is known."""
    known = len(supervisor.guardians)
    guardian = link.connect(*supervisor.address, name=name, slot=slot)
    assert guardian is not None
    supervisor.serve(lambda: len(supervisor.guardians) > known, "a connection")
    supervisor.settle()
    return guardian
