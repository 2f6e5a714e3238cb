"""One run of a whole job in an experiment tracker: rank 0's rows, sent by a thread."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import uuid

from hvdrecover.clock import Clock
from hvdrecover.elastic.scalars.log import Number
from hvdrecover.elastic.scalars.trackers import Row, Tracker

logger = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds for a tracker to send everything when training has ended
HANDOVER = 10.0  # the same when another process continues the run: the other ranks wait meanwhile
MOST_DUE = 10_000  # commits whose rows may wait for the tracker

_Rows = dict[int, tuple[float, dict[str, Number]]]


class Tracked:
    """Sends rank 0's rows to a tracker once a commit holds their steps, so no row is ever taken back.

    A thread talks to the tracker, so a tracker that hangs delays no step.

    Args:
        tracker: the tracker.
        clock: where times come from.

    Attributes:
        run: id of the job's run.

    Raises:
        ConfigError: the tracker cannot be used.
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
        """Return the scalars of a step, to be added to."""
        _, values = self._rows.setdefault(step, (self._clock.now(), {}))
        return values

    def begin(self, rank: int) -> None:
        """Report from now on if this is rank 0; else leave the run to another process."""
        self._reporting, self._finished = rank == 0, False
        if not self._reporting:
            self.close()

    def go_to(self, step: int) -> None:
        """Resume from a step; later steps come again."""
        self._rows = {number: row for number, row in self._rows.items() if number <= step}
        self._held = step

    def captured(self, step: int) -> None:
        """Send the rows up to a step that a commit holds."""
        self._held = step
        self.keep_up()  # now, because a rank may leave right after the commit

    def keep_up(self) -> None:
        """Send the rows that commits hold."""
        if next(iter(self._rows), self._held + 1) > self._held:
            return  # at each step but those after a commit
        due = {step: row for step, row in self._rows.items() if step <= self._held}
        self._rows = {step: row for step, row in self._rows.items() if step > self._held}
        if self._reporting:
            self._thread = self._thread or _Sender(self._tracker, self.run)
            self._thread.send(due)

    def finish(self) -> None:
        """Release all rows: the training function has returned, so no step is rolled back."""
        self._held = max(self._rows, default=self._held)
        self._finished = True

    def close(self) -> None:
        """Send the rest and wait for the tracker. Later rows go to the same run."""
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
        """Have the thread send rows."""
        if not self._thread.is_alive():
            return  # the tracker has failed, and a warning has said so
        if self._due.qsize() < MOST_DUE:
            self._due.put(rows)
        elif not self._late:
            self._late = True
            logger.warning("%s does not keep up: scalars are left out", self._name)

    def end(self, *, finished: bool) -> None:
        """Have the thread send everything and end, and wait for it."""
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
                # Values that the script reports of a step after its commit come as a second row of the step.
                fresh = [row for row in _measured(rows) if row.step > known and row.step >= sent]
                if fresh:
                    self._tracker.log(fresh)
                    sent = fresh[-1].step
            self._tracker.close(finished=self._finished)
        except Exception as error:  # trackers raise errors of many classes
            logger.warning("%s: no more scalars are logged: %s: %s", self._name, type(error).__name__, error)


def _measured(rows: _Rows) -> list[Row]:
    """Return rows of numbers, and wait for those that a device still computes."""
    return [
        Row(step, time, {name: float(value) for name, value in values.items()})
        for step, (time, values) in sorted(rows.items())
    ]
