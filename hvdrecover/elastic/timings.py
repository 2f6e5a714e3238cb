"""How long the parts of a recovery take, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from hvdrecover.clock import Clock

Part = Literal["reset", "rendezvous", "load", "sync", "first_step"]


class Timings:
    """Adds up the parts of one recovery after another.

    Args:
        clock: where times come from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parts: dict[Part, float] = {}

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Count what is inside as a part."""
        started = self._clock.monotonic()
        try:
            yield
        finally:
            self.add(part, self._clock.monotonic() - started)

    def add(self, part: Part, seconds: float) -> None:
        """Add to a part."""
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def spent(self, part: Part) -> float:
        """Seconds spent on a part of this recovery so far."""
        return self._parts.get(part, 0.0)

    def take(self) -> dict[str, float]:
        """The parts in seconds and their sum, and begin anew."""
        names: tuple[Part, ...] = ("reset", "rendezvous", "load", "sync", "first_step")
        parts: dict[str, float] = {name: round(self._parts.get(name, 0.0), 6) for name in names}
        self._parts = {}
        return {**parts, "seconds": round(sum(parts.values()), 6)}
