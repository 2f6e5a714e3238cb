"""Events: each is one line of the run's record for programs, and one line of text for people.

An event holds ``time`` (seconds since the Unix epoch), ``kind``, ``host``, ``pid``, ``rank`` and the facts of
its kind; ``docs/events.md`` lists them all, and `hvdrecover.record` describes their way to the record.

Emitting an event never raises, and never waits for another process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdrecover import heartbeat
from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.config import Config
from hvdrecover.record import RUNS, Record, encode
from hvdrecover.redaction import printable

logger = logging.getLogger("hvdrecover")

_MOST_PENDING = 1 << 20  # maximum bytes of events that wait for room in the pipe


class Events:
    """The events of one process.

    Args:
        add: takes each event; None discards them.
        host: name of this host.
        clock: source of the times.
    """

    def __init__(
        self, add: Callable[[Mapping[str, Any]], None] | None, host: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._add = add
        self._host = host
        self._clock = clock
        self.rank = -1  # while it has none

    def emit(self, kind: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any) -> None:
        """Record one event; ``message``, if given, is the line for people."""
        if message is not None:
            logging.getLogger(f"{__name__}.{kind}").log(level, message)
        if self._add is not None:
            common = {"kind": kind, "host": self._host, "pid": os.getpid(), "rank": self.rank}
            self._add({"time": self._clock.now(), **common, **facts})


class Pipe:
    """The pipe to the guardian of this training process.

    An event in the pipe reaches the guardian even if this process is killed at once. If the guardian does not
    read, events wait here for room, and are discarded when there are too many: training never waits.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor  # the end to write to; it does not block
        self._pending = b""
        self._lock = threading.Lock()

    def add(self, event: Mapping[str, Any]) -> None:
        """Send an event, with the time by the clock that all processes of a host share."""
        if (line := encode({**event, "emitted": time.monotonic()})) is None:
            return
        with self._lock:
            if len(self._pending) < _MOST_PENDING:
                self._pending += line
            try:
                while self._pending:
                    self._pending = self._pending[os.write(self._descriptor, self._pending) :]
            except BlockingIOError:
                return
            except OSError:  # the guardian is gone, and the kernel kills this process as well
                self._pending = b""


def of_training(config: Config, clock: Clock = SYSTEM_CLOCK) -> Events:
    """Return the events of a training process, for its guardian. Without one, rank 0 records its own."""
    if (descriptor := heartbeat.event_pipe) is not None:
        return Events(Pipe(descriptor).add, config.host, clock)
    if config.events is None:
        return Events(None, config.host, clock)
    record = Record(config.events)

    def add(event: Mapping[str, Any]) -> None:
        if event["rank"] == 0:
            record.add(event)

    return Events(add, config.host, clock)


def recorded(config: Config, clock: Clock = SYSTEM_CLOCK, seconds: float | None = None) -> Events:
    """Return the events of a process that writes to the record itself; ``seconds`` as of `Record`."""
    return Events(None if config.events is None else Record(config.events, seconds).add, config.host, clock)


def new_run(clock: Clock) -> Path:
    """Return a folder for a run that starts now; its name sorts after those of earlier runs."""
    moment = datetime.fromtimestamp(clock.now(), UTC).strftime("%Y%m%dT%H%M%SZ")
    return RUNS / f"{moment}-{os.getpid()}"


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), "\n\t")  # names in it may be those of another's files


def show_on_terminal(config: Config) -> None:
    """Print hvdrecover's lines on stderr, unless the program has set up logging itself. Keep its level."""
    if logger.level == logging.NOTSET:
        logger.setLevel(config.log.upper())
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("hvdrecover: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
