"""Marks of time, and what the parts of a step took by them."""

from __future__ import annotations

from dataclasses import dataclass

from hvdrecover.clock import Clock


@dataclass(frozen=True)
class Step:
    """The times of one step, in seconds; if several ended at once, their averages.

    Attributes:
        whole: from the end of the step before, without commits.
        data_wait: from there, or from a commit since, until the batch was there; None if that was not seen.
        allreduce_wait: for gradients of other ranks; None if that was not seen.
    """

    whole: float
    data_wait: float | None
    allreduce_wait: float | None


class Times:
    """Turns marks of time into durations.

    Args:
        clock: where times come from.

    Attributes:
        under_way: whether what happens now belongs to the step to come, and not to the one that has ended.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A stretch of training begins; what was before is in no step."""
        self.under_way = True
        self._ended = self._idle = self._clock.monotonic()
        self._stalled = 0.0
        self._data: float | None = None
        self._wait: float | None = None
        self._waiting: float | None = None
        self._fetched = False
        self._busy = 0.0

    def fetched(self) -> None:
        """The batch is there; only the first time in a step counts."""
        if not self._fetched:
            self.waited_for_data(self._clock.monotonic() - self._idle)
            self._fetched = self.under_way = True

    def waited_for_data(self, seconds: float) -> None:
        """Somebody else has seen how long the batch took to come; nothing new if it was seen here."""
        if not self._fetched:
            self._data = (self._data or 0.0) + seconds

    def waiting(self) -> None:
        """This rank begins to wait for the others, if it doesn't already."""
        if self._waiting is None:
            self._waiting = self._clock.monotonic()

    def arrived(self) -> None:
        """The others are there."""
        if self._waiting is not None:
            self.waited(self._clock.monotonic() - self._waiting)
            self._waiting = None

    def waited(self, seconds: float) -> None:
        """Somebody else has seen how long this rank waited for the others."""
        self._wait = (self._wait or 0.0) + seconds

    def stepped(self, steps: int = 1) -> Step:
        """So many steps have ended."""
        now = self._clock.monotonic()
        whole = now - self._ended - self._stalled
        self._busy += max(0.0, whole - (self._wait or 0.0))
        step = Step(whole / steps, _part(self._data, steps), _part(self._wait, steps))
        self._ended = self._idle = now
        self._stalled = 0.0
        self._data = self._wait = self._waiting = None
        self.under_way = self._fetched = False
        return step

    def committed(self, began: float) -> float:
        """A commit has ended.

        Args:
            began: when it began, in monotonic seconds.

        Returns:
            How many seconds it took.
        """
        self._idle = self._clock.monotonic()
        self._stalled += self._idle - began
        return self._idle - began

    def take_busy(self) -> float:
        """Seconds of steps since the last time, without those of waiting for other ranks."""
        busy, self._busy = self._busy, 0.0
        return busy


def _part(seconds: float | None, steps: int) -> float | None:
    return None if seconds is None else seconds / steps
