"""The record of a run: the file ``run.jsonl`` in the run's folder.

Its first line names the schema; each further line is one event (``docs/events.md``). The supervisor writes
the file:

1. A training process hands its events to its guardian through a pipe (`hvdrecover.events.Pipe`).
2. The guardian sends them to the supervisor over its connection, with their age.
3. The supervisor appends them, with their time by its own clock, so hosts with wrong clocks do no harm.

Without a guardian, rank 0 appends its own events.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdrecover.clock import Bounded
from hvdrecover.errors import ConfigError

logger = logging.getLogger("hvdrecover")

FILE = "run.jsonl"
RUNS = Path("hvdrecover-runs")  # holds the folders of runs for which the user named none
SCHEMA = 1
_LARGEST = 1 << 62  # larger numbers are not counts of ours, and do not fit into arrays
_END_OF_TIME = 250_000_000_000  # the year 9892; calendars end soon after


@dataclass(frozen=True)
class Event:
    """One event."""

    time: float  # seconds since the Unix epoch, by the clock of the supervisor
    kind: str
    host: str
    rank: int  # -1 if it has none
    pid: int
    facts: Mapping[str, Any]  # all fields of the line, by name

    def number(self, name: str) -> float | None:
        """Return a fact if it is a finite number, else None."""
        return number(self.facts.get(name))

    def whole(self, name: str) -> int | None:
        """Return a fact if it is a whole number, else None."""
        return whole(self.facts.get(name))

    def word(self, name: str) -> str:
        """Return a fact if it is a text, else an empty text."""
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


# -- writing -------------------------------------------------------------------------------------------


def encode(event: Mapping[str, Any]) -> bytes | None:
    """Return the line of an event; None, with a warning, if its facts cannot be written as JSON."""
    try:
        return json.dumps(event, default=str, skipkeys=True).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        logger.warning("events: an event of kind %s cannot be written: %s", event.get("kind"), error)
        return None


class Record:
    """Appends events to the record of a run. Several threads, and processes of one host, may do so at once.

    If the disk takes longer than ``seconds`` for an event, events are left out until it answers.
    """

    def __init__(self, folder: Path, seconds: float | None = None) -> None:
        self._folder = folder
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


class Follower:
    """Reads a record, a folder or its file, while it is being written. It need not exist yet."""

    def __init__(self, place: Path) -> None:
        self._path = place if place.suffix == ".jsonl" else place / FILE
        self._offset = 0

    def look(self) -> list[Event]:
        """Return the events that were appended since the last look; a line that is incomplete is left.

        Raises:
            ConfigError: the file cannot be read, or is of another version.
        """
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
        if (
            time is None
            or not 0 <= time < _END_OF_TIME
            or not isinstance(kind, str)
            or not isinstance(host, str)
        ):
            return None
        rank = whole(facts.get("rank"))
        return Event(time, kind, host, -1 if rank is None else rank, whole(facts.get("pid")) or 0, facts)


def read(place: Path) -> list[Event]:
    """Return the events of a run in order of time; events of one process are in their own order.

    Raises:
        ConfigError: the record is missing, cannot be read, or has another schema.
    """
    events = Follower(place).look()
    if not events:
        problem = f"'{place}' holds no events: {FILE} is missing or empty; name the folder of a run"
        raise ConfigError("FOLDER", problem)
    return sorted(events, key=lambda event: event.time)


def locate(folder: Path | None, configured: Path | None, runs: Path = RUNS) -> Path:
    """Return the folder of the run to report on: the user's, the configured one, or the newest of ``runs``.

    Raises:
        ConfigError: the folder, or any run, is missing.
    """
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
