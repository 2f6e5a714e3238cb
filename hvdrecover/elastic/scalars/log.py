"""One rank's run in TensorBoard: rows of scalars, and the file that they go to."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from typing import Any

from hvdrecover.clock import Clock
from hvdrecover.elastic.interfaces import Writer

logger = logging.getLogger(__name__)

Number = Any
"""A number, or a tensor of one element that a device may still compute."""

# A row waits for so long, or until there are so many rows, so that no step waits for a device.
KEPT_SECONDS = 10.0
KEPT_STEPS = 1000


class Log:
    """Keeps rows for a while, then writes them. If that fails, training continues without them.

    Args:
        folder: path or URL of the folder for the runs of all ranks.
        open_writer: `hvdrecover.elastic.interfaces.Framework.writer`.
        clock: where times come from.
    """

    def __init__(self, folder: str, open_writer: Callable[[str, int], Writer], clock: Clock) -> None:
        self._folder = folder.rstrip("/")
        self._open_writer = open_writer
        self._clock = clock
        self._rows: dict[int, tuple[float, dict[str, Number]]] = {}
        self._last = 0  # step
        self._first = 1  # step of the next file; TensorBoard drops this step and later ones of older files
        self._rank: int | None = None
        self._writer: Writer | None = None
        self._failed = False
        atexit.register(self.close)

    def row(self, step: int) -> dict[str, Number]:
        """Return the scalars of a step, to be added to."""
        self._last = step
        _, values = self._rows.setdefault(step, (self._clock.now(), {}))
        return values

    def begin(self, rank: int) -> None:
        """Write to the run of a rank from now on."""
        if rank != self._rank:
            self.close()
        self._rank = rank
        self._attempt(self._open)

    def go_to(self, step: int) -> None:
        """Resume from a step. Later steps are dropped here, and the next file drops them in the run."""
        self._rows = {number: row for number, row in self._rows.items() if number <= step}
        self.close()
        self._last, self._first = step, step + 1

    def keep_up(self) -> None:
        """Write the rows if the oldest has waited long enough."""
        since = next((time for time, _ in self._rows.values()), None)
        if since is not None and (len(self._rows) >= KEPT_STEPS or self._clock.now() - since >= KEPT_SECONDS):
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
            rows, self._rows = self._rows, {}
            for step, (time, values) in rows.items():
                if self._writer is not None:
                    self._writer.scalars({name: float(value) for name, value in values.items()}, step, time)

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
