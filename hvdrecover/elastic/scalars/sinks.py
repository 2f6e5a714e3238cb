"""The destinations of a rank's scalars: its run in TensorBoard, and the job's run in an experiment tracker.

Both keep rows for a while. If a destination fails, training continues without it.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from hvdrecover.clock import Clock
from hvdrecover.elastic.scalars.trackers import Row, Tracker
from hvdrecover.state.adapter import Writer

logger = logging.getLogger(__name__)

Number = Any
"""A number, or a tensor of one element that a device may still compute."""

# TensorBoard's rows wait for so long, or until there are so many, so that no step waits for a device.
KEPT_SECONDS = 10.0
KEPT_STEPS = 1000
PATIENCE = 60.0  # seconds for a tracker to send everything when training has ended
HANDOVER = 10.0  # the same when another process continues the run: the other ranks wait meanwhile
MOST_DUE = 10_000  # commits whose rows may wait for the tracker


class Rows:
    """The scalars of steps, in the order of the steps, that are not written yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[int, tuple[float, dict[str, Number]]] = {}

    def row(self, step: int) -> dict[str, Number]:
        """Return the scalars of a step, to be added to."""
        _, values = self._rows.setdefault(step, (self._clock.now(), {}))
        return values

    def go_to(self, step: int) -> None:
        """Resume from a step: drop later ones."""
        self._rows = {number: row for number, row in self._rows.items() if number <= step}

    def take(self, step: float = math.inf) -> list[Row]:
        """Remove the rows up to a step and return them."""
        taken = [Row(number, *row) for number, row in self._rows.items() if number <= step]
        self._rows = {number: row for number, row in self._rows.items() if number > step}
        return taken


def _measured(row: Row) -> Row:
    """Return a row of numbers; waits for numbers that a device still computes."""
    return Row(row.step, row.time, {name: float(value) for name, value in row.values.items()})


class Log(Rows):
    """One rank's run in TensorBoard.

    Args:
        folder: path or URL of the folder for the runs of all ranks.
        open_writer: `hvdrecover.state.adapter.Framework.writer`.
        clock: where times come from.
    """

    def __init__(self, folder: str, open_writer: Callable[[str, int], Writer], clock: Clock) -> None:
        super().__init__(clock)
        self._folder = folder.rstrip("/")
        self._open_writer = open_writer
        self._last = 0  # step
        self._first = 1  # step of the next file; TensorBoard drops this step and later ones of older files
        self._rank: int | None = None
        self._writer: Writer | None = None
        self._failed = False
        atexit.register(self.close)

    def row(self, step: int) -> dict[str, Number]:
        """Return the scalars of a step, to be added to."""
        self._last = step
        return super().row(step)

    def begin(self, rank: int) -> None:
        """Write to the run of a rank from now on."""
        if rank != self._rank:
            self.close()
        self._rank = rank
        self._attempt(self._open)

    def go_to(self, step: int) -> None:
        """Resume from a step. The next file drops later steps in the run."""
        super().go_to(step)
        self.close()
        self._last, self._first = step, step + 1

    def keep_up(self) -> None:
        """Write the rows if the oldest has waited long enough."""
        oldest = next((time for time, _ in self._rows.values()), math.inf)
        if len(self._rows) >= KEPT_STEPS or self._clock.now() - oldest >= KEPT_SECONDS:
            self._attempt(self._write)

    def close(self) -> None:
        """Write all rows. Later rows go to another file of the same run."""
        self._attempt(self._write)
        if self._writer is not None:
            self._attempt(self._writer.close)
            self._writer = None
        self._first = self._last + 1

    def _write(self) -> None:
        if self._rows:
            self._open()
            for row in map(_measured, self.take()):
                if self._writer is not None:
                    self._writer.scalars(row.values, row.step, row.time)

    def _open(self) -> None:
        if self._writer is None and self._rank is not None:
            self._writer = self._open_writer(f"{self._folder}/rank-{self._rank}", self._first)

    def _attempt(self, function: Callable[[], None]) -> None:
        if self._failed:
            self._rows = {}
            return
        try:
            function()
        except Exception as error:  # file systems raise errors of many classes
            self._failed = True
            logger.warning("%s: no more scalars are written: %s", self._folder, error)


class Tracked(Rows):
    """One run of the whole job in a tracker: rank 0's rows.

    Rows are sent once a commit holds their steps, so no row is ever taken back. A thread talks to the
    tracker, so a tracker that hangs delays no step.

    Args:
        tracker: the tracker.
        clock: where times come from.

    Attributes:
        run: id of the job's run.
    """

    def __init__(self, tracker: Tracker, clock: Clock) -> None:
        super().__init__(clock)
        self.run = uuid.uuid4().hex[:16]
        self._tracker = tracker
        self._name = type(tracker).__name__
        self._held = 0  # step of the newest commit
        self._reporting = False  # whether this is rank 0
        self._finished = self._late = False
        self._due: queue.SimpleQueue[Sequence[Row] | None] = queue.SimpleQueue()  # None ends the thread
        self._thread: threading.Thread | None = None
        atexit.register(self.close)

    def begin(self, rank: int) -> None:
        """Report from now on if this is rank 0; else leave the run to another process."""
        self._reporting, self._finished = rank == 0, False
        if not self._reporting:
            self.close()

    def go_to(self, step: int) -> None:
        """Resume from a step; later steps come again."""
        super().go_to(step)
        self._held = step

    def captured(self, step: int) -> None:
        """Send the rows up to a step that a commit holds."""
        self._held = step
        self.keep_up()  # now, because a rank may leave right after the commit

    def keep_up(self) -> None:
        """Send the rows that commits hold."""
        if next(iter(self._rows), self._held + 1) > self._held:
            return  # at each step but those after a commit
        rows = self.take(self._held)
        if not self._reporting:
            return
        if self._thread is None:
            self._due = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._send, name="hvdrecover-tracker", daemon=True)
            self._thread.start()
        if not self._thread.is_alive():
            return  # the tracker has failed, and a warning has said so
        if self._due.qsize() < MOST_DUE:
            self._due.put(rows)
        elif not self._late:
            self._late = True
            logger.warning("%s does not keep up: scalars are left out", self._name)

    def finish(self) -> None:
        """Release all rows: the training function has returned, so no step is rolled back."""
        self._held = max(self._rows, default=self._held)
        self._finished = True

    def close(self) -> None:
        """Send the rest and wait for the tracker. Later rows go to the same run."""
        self.keep_up()
        if self._thread is not None:
            patience = PATIENCE if self._finished else HANDOVER
            self._due.put(None)
            self._thread.join(patience)
            if self._thread.is_alive():
                logger.warning("%s has not answered for %.0f s and is left", self._name, patience)
            self._thread = None

    def _send(self) -> None:
        due = self._due  # `close` may give up this thread, and the next thread gets another queue
        try:
            known = sent = self._tracker.open(self.run)
            while (rows := due.get()) is not None:
                # Values that the script reports of a step after its commit come as a second row of the step.
                fresh = [_measured(row) for row in rows if row.step > known and row.step >= sent]
                if fresh:
                    self._tracker.log(fresh)
                    sent = fresh[-1].step
            self._tracker.close(finished=self._finished)
        except Exception as error:  # trackers raise errors of many classes
            logger.warning("%s: no more scalars are logged: %s: %s", self._name, type(error).__name__, error)
