"""Events, each as one line of JSON for programs and one line of text for people.

An event line holds ``time`` (seconds since the Unix epoch), ``kind``, ``host``, ``pid``, ``rank`` and the
facts of its kind; ``docs/events.md`` lists them all.

Writing an event never raises. It blocks only on an append to a file. Guardians and the supervisor, which must
never hang, wait for that for a bounded time.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdrecover.bounded import Bounded
from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.config import Config
from hvdrecover.redaction import printable

logger = logging.getLogger("hvdrecover")


class Events:
    """The event log of one process.

    Args:
        folder: where to append ``HOST-PID.jsonl``; None writes no file.
        host: the host's name.
        clock: where the times come from.
        seconds: how long the disk may take for a line, before events are left out until it answers. With
            None, it may take as long as it likes: a training process has a guardian, which ends hangs.
    """

    def __init__(
        self, folder: Path | None, host: str, clock: Clock = SYSTEM_CLOCK, seconds: float | None = None
    ) -> None:
        self._folder = folder
        self._host = host
        self._clock = clock
        self._descriptor: int | None = None
        self._bounded = Bounded(seconds) if seconds is not None else None
        self._left_out = False
        self.rank = 0

    def emit(self, kind: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any) -> None:
        """Record one event; ``message``, if given, is the line for people."""
        if message is not None:
            logging.getLogger(f"{__name__}.{kind}").log(level, message)
        if self._folder is None:
            return
        line = {
            "time": self._clock.now(),
            "kind": kind,
            "host": self._host,
            "pid": os.getpid(),
            "rank": self.rank,
            **facts,
        }
        try:
            text = json.dumps(line, default=str, skipkeys=True)
        except (TypeError, ValueError, RecursionError) as error:
            logger.warning("events: an event of kind %s can't be written: %s", kind, error)
            return
        try:
            if self._bounded is None:
                self._append(self._folder, text)
            else:
                self._bounded(self._append, self._folder, text)
            self._left_out = False
        except TimeoutError as error:
            if not self._left_out:
                logger.warning(
                    "events: %s does not take events (%s); they are left out until it does",
                    self._folder,
                    error,
                )
            self._left_out = True
        except (OSError, ValueError) as error:
            self._folder = None
            logger.warning("events: %s; no further events are written", error)

    def _append(self, folder: Path, text: str) -> None:
        os.write(self._open(folder), f"{text}\n".encode())

    def _open(self, folder: Path) -> int:
        if self._descriptor is None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self._host}-{os.getpid()}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._descriptor


RUNS = Path("hvdrecover-runs")  # where the events of runs go that were given no folder


def new_run(clock: Clock) -> Path:
    """A folder for the events of a run that starts now; it sorts behind those of earlier runs."""
    moment = datetime.fromtimestamp(clock.now(), UTC).strftime("%Y%m%dT%H%M%SZ")
    return RUNS / f"{moment}-{os.getpid()}"


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), "\n\t")  # names in it may be those of another's files


def show_on_terminal(config: Config) -> None:
    """Print hvdrecover's lines on stderr, unless the program has set up logging itself.

    A level that the program has given to the logger is kept.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(config.log.upper())
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("hvdrecover: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
