"""Events: each is one line of the run's record for programs, and one line of text for people.

An event holds ``time`` (seconds since the Unix epoch), ``kind``, ``host``, ``pid``, ``rank`` and the facts of
its kind; ``docs/events.md`` lists them all. The record is the file ``run.jsonl`` in the run's folder. Its
first line names the schema; each further line is one event. The supervisor writes the file:

1. A training process hands its events to its guardian through a `Pipe`. Emitting an event never raises, and
   never waits for another process.
2. The guardian sends them to the supervisor over its connection, with their age.
3. The supervisor appends them, with their time by its own clock, so hosts with wrong clocks do no harm.

Without a guardian, rank 0 appends its own events.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdrecover import heartbeat
from hvdrecover.config import Config
from hvdrecover.errors import ConfigError
from hvdrecover.machine import SYSTEM_CLOCK, Bounded, Clock
from hvdrecover.texts import printable

logger = logging.getLogger("hvdrecover")

FILE = "run.jsonl"
RUNS = Path("hvdrecover-runs")  # holds the folders of runs for which the user named none
SCHEMA = 1
_MOST_PENDING = 1 << 20  # maximum bytes of events that wait for room in the pipe
_LARGEST = 1 << 62  # larger numbers are not counts of ours, and do not fit into arrays
_END_OF_TIME = 250_000_000_000  # the year 9892; calendars end soon after


# -- emitting ------------------------------------------------------------------------------------------


class Events:
    """The events of one process; ``add`` takes each event, None discards them."""

    def __init__(
        self, add: Callable[[Mapping[str, Any]], None] | None, host: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._add, self._host, self._clock = add, host, clock
        self.rank = -1  # while it has none

    def emit(self, kind: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any) -> None:
        """Record one event; ``message``, if given, is the line for people."""
        if message is not None:
            logging.getLogger(f"{__name__}.{kind}").log(level, message)
        if self._add is not None:
            common = {"kind": kind, "host": self._host, "pid": os.getpid(), "rank": self.rank}
            self._add({"time": self._clock.now(), **common, **facts})


class Pipe:
    """The pipe to the guardian, which gets an event in it even if this process is killed at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor  # the end to write to; it does not block
        self._pending = b""
        self._lock = threading.Lock()

    def add(self, event: Mapping[str, Any]) -> None:
        """Send an event, with the time by the clock that all processes of a host share."""
        if (line := encode({**event, "emitted": time.monotonic()})) is None:
            return
        with self._lock:
            # Training never waits: if the guardian does not read, events wait here, up to a limit.
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
    add = Record(config.events).add
    return Events(lambda event: add(event) if event["rank"] == 0 else None, config.host, clock)


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


# -- writing -------------------------------------------------------------------------------------------


def encode(event: Mapping[str, Any]) -> bytes | None:
    """Return the line of an event; None, with a warning, if its facts cannot be written as JSON."""
    try:
        return json.dumps(event, default=str, skipkeys=True).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        logger.warning("events: an event of kind %s cannot be written: %s", event.get("kind"), error)
        return None


class Record:
    """Appends events to a run's record; several threads, and processes of one host, may do so at once."""

    def __init__(self, folder: Path, seconds: float | None = None) -> None:
        self._folder = folder
        # If the disk takes longer for an event, events are left out until it answers.
        self._bounded = None if seconds is None else Bounded(seconds)
        self._descriptor: int | None = None
        self._lines: list[bytes] = []
        self._lock = threading.Lock()  # the background writer of a training process emits events as well
        self._torn = False  # the file does not end with a complete line
        self._failed = False

    def add(self, event: Mapping[str, Any]) -> None:
        self.put(event)
        self.flush()

    def put(self, event: Mapping[str, Any]) -> None:
        """Append an event at the next `flush`, together with others: each bounded write takes a thread."""
        if (line := encode(event)) is not None:
            with self._lock:
                self._lines.append(line)

    def flush(self) -> None:
        """Append the events that wait. Never raises; the first failure to write is a warning."""
        with self._lock:
            if not self._lines:
                return
            lines, self._lines = b"".join(self._lines), []
            try:
                if self._bounded is None:
                    self._append(lines)
                else:
                    self._bounded(self._append, lines)
            except (OSError, ValueError) as error:  # also TimeoutError
                if not self._failed:
                    self._failed = True
                    logger.warning("events: %s; events may be missing in %s", error, self._folder / FILE)

    def _append(self, lines: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        lines = b"\n" + lines if self._torn else lines
        # One write call, so that the kernel does not mix lines of two processes.
        self._torn = os.write(self._descriptor, lines) < len(lines)

    def _open(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / FILE
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if size := os.fstat(descriptor).st_size:
            with path.open("rb") as file:
                file.seek(size - 1)
                self._torn = file.read(1) != b"\n"  # the last writer was killed in the middle of a line
        else:  # two processes may both see an empty file; a second line of this kind is passed over
            os.write(descriptor, f'{{"schema": {SCHEMA}}}\n'.encode())
        return descriptor


# -- reading -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    time: float  # seconds since the Unix epoch, by the clock of the supervisor
    kind: str
    host: str
    rank: int  # -1 if it has none
    pid: int
    facts: Mapping[str, Any]  # all fields of the line, by name

    def number(self, name: str) -> float | None:
        return number(self.facts.get(name))

    def whole(self, name: str) -> int | None:
        return whole(self.facts.get(name))

    def word(self, name: str) -> str:
        value = self.facts.get(name)
        return value if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """Return a value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return float(value) if math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """Return a value if it is a whole number, else None."""
    return value if isinstance(value, int) and number(value) is not None else None


class Follower:
    """Reads a record, a folder or its file, while it is being written; it need not exist yet."""

    def __init__(self, place: Path) -> None:
        self._path = place if place.suffix == ".jsonl" else place / FILE
        self._offset = 0

    def look(self) -> list[Event]:
        """Return the events that were appended since the last look; a line that is incomplete is left."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError("FOLDER", f"'{self._path}' cannot be read: {error.strerror}") from error
        end = data.rfind(b"\n") + 1
        self._offset += end
        found = (self._parse(line) for line in data[:end].splitlines())
        return [event for event in found if event is not None]

    def _parse(self, line: bytes) -> Event | None:
        """Return the event of a line; None if it is not an event, such as a line that is incomplete."""
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(facts, dict):
            return None
        time, kind, host = number(facts.get("time")), facts.get("kind"), facts.get("host")
        if kind is None and facts.get("schema", SCHEMA) != SCHEMA:
            problem = f"schema {facts['schema']!r}; this version of hvdrecover reads schema {SCHEMA}"
            raise ConfigError("FOLDER", f"'{self._path}' has {problem}")
        if not isinstance(kind, str) or not isinstance(host, str):
            return None
        if time is None or not 0 <= time < _END_OF_TIME:
            return None
        rank = whole(facts.get("rank"))
        return Event(time, kind, host, -1 if rank is None else rank, whole(facts.get("pid")) or 0, facts)


def read(place: Path) -> list[Event]:
    """Return the events of a run in order of time; events of one process are in their own order."""
    events = Follower(place).look()
    if not events:
        problem = f"'{place}' holds no events: {FILE} is missing or empty; name the folder of a run"
        raise ConfigError("FOLDER", problem)
    return sorted(events, key=lambda event: event.time)


def locate(folder: Path | None, configured: Path | None, runs: Path = RUNS) -> Path:
    """Return the run to report on: the user's, the configured one, or the newest below ``runs``."""
    for name, wanted in (("FOLDER", folder), ("HVDRECOVER_EVENTS", configured)):
        if wanted is not None:
            if not wanted.is_dir():
                raise ConfigError(name, f"'{wanted}' is not a folder; name the folder of a run")
            return wanted
    records = sorted(runs.glob(f"*/{FILE}"), key=lambda path: (path.stat().st_mtime, path))
    if not records:
        problem = (
            f"no run to report on: neither a folder nor HVDRECOVER_EVENTS is given, and '{runs}' holds no "
            "run; name the folder of a run"
        )
        raise ConfigError("FOLDER", problem)
    return records[-1].parent
