"""The run of a whole job: rows of scalars, and the experiment tracker that they go to."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import uuid

from hvdrecover.clock import Clock
from hvdrecover.elastic.scalars.observed import Number
from hvdrecover.elastic.scalars.trackers import Row, Tracker

logger = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds for a tracker to send what it has, when training has ended
HANDOVER = 10.0  # seconds for that when another process continues the run: the other ranks wait for it
MOST_DUE = 10_000  # commits whose rows may wait for it

_Rows = dict[int, tuple[float, dict[str, Number]]]


class Tracked:
    """Hands rank 0's rows to a tracker once a commit holds their steps, so that none is ever taken back.

    A thread of its own does that: a tracker that hangs holds up no step.

    Args:
        tracker: the tracker.
        clock: where times come from.

    Attributes:
        run: id of the job's run.

    Raises:
        ConfigError: the tracker can't be used.
    """

    def __init__(self, tracker: Tracker, clock: Clock) -> None:
        tracker.check()
        self.run = uuid.uuid4().hex[:16]
        self._tracker = tracker
        self._clock = clock
        self._rows: _Rows = {}
        self._held = 0  # step of the newest commit
        self._reporting = False  # whether this is rank 0
        self._finished = False
        self._thread: _Sender | None = None
        atexit.register(self.close)

    def row(self, step: int) -> dict[str, Number]:
        """The scalars of a step, to be added to."""
        _, values = self._rows.setdefault(step, (self._clock.now(), {}))
        return values

    def begin(self, rank: int) -> None:
        """Report from now on, or leave it to another rank."""
        self._reporting, self._finished = rank == 0, False
        if not self._reporting:
            self.close()

    def go_to(self, step: int) -> None:
        """Resume from a step; later ones will come again."""
        self._rows = {number: row for number, row in self._rows.items() if number <= step}
        self._held = step

    def captured(self, step: int) -> None:
        """A commit holds all steps up to this one."""
        self._held = step
        self.keep_up()  # now, as a rank that leaves does so at a commit

    def keep_up(self) -> None:
        """Hand over what commits hold."""
        if next(iter(self._rows), self._held + 1) > self._held:
            return  # at each step but those after a commit
        due = {step: row for step, row in self._rows.items() if step <= self._held}
        self._rows = {step: row for step, row in self._rows.items() if step > self._held}
        if not self._reporting:
            return
        if self._thread is None:
            self._thread = _Sender(self._tracker, self.run)
        self._thread.send(due)

    def finish(self) -> None:
        """The training function has returned: no commit need hold the rest."""
        self._held = max(self._rows, default=self._held)
        self._finished = True

    def close(self) -> None:
        """Hand over the rest, and wait for the tracker to send it. What comes later goes to the same run."""
        self.keep_up()
        if self._thread is not None:
            self._thread.end(finished=self._finished)
            self._thread = None


class _Sender:
    """The thread that talks to the tracker."""

    def __init__(self, tracker: Tracker, run: str) -> None:
        self._tracker = tracker
        self._run = run
        self._due: queue.SimpleQueue[_Rows | None] = queue.SimpleQueue()
        self._finished = self._late = False
        self._thread = threading.Thread(target=self._work, name="hvdrecover-tracker", daemon=True)
        self._thread.start()

    def send(self, rows: _Rows) -> None:
        """Send rows soon."""
        if not self._thread.is_alive():
            return  # it has failed, and has said so
        if self._due.qsize() < MOST_DUE:
            self._due.put(rows)
        elif not self._late:
            self._late = True
            logger.warning("%s does not keep up: scalars are left out", self._name)

    def end(self, *, finished: bool) -> None:
        """Send all that is due, and end."""
        self._finished = finished
        self._due.put(None)
        patience = PATIENCE if finished else HANDOVER
        self._thread.join(patience)
        if self._thread.is_alive():
            logger.warning("%s has not answered for %.0f s and is left", self._name, patience)

    @property
    def _name(self) -> str:
        return type(self._tracker).__name__

    def _work(self) -> None:
        try:
            known = sent = self._tracker.open(self._run)
            while (rows := self._due.get()) is not None:
                # What is told of a step after its commit comes in a row of its own.
                fresh = [row for row in _measured(rows) if row.step > known and row.step >= sent]
                if fresh:
                    self._tracker.log(fresh)
                    sent = fresh[-1].step
            self._tracker.close(finished=self._finished)
        except Exception as error:  # whatever a tracker may raise
            logger.warning("%s: no more scalars are logged: %s: %s", self._name, type(error).__name__, error)


def _measured(rows: _Rows) -> list[Row]:
    """Wait for numbers that are still on a device."""
    return [
        Row(step, time, {name: float(value) for name, value in values.items()})
        for step, (time, values) in sorted(rows.items())
    ]
