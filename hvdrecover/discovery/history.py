"""What one call of host discovery leaves for the next: a JSON file that calls share.

The holder of the file's lock may write it. The file is replaced as a whole, so a reader needs no lock.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvdrecover.discovery.checks import Health
from hvdrecover.discovery.hosts import Host

_FORMAT = 2
_BEGINNING = f'{{"format": {_FORMAT}'.encode()
_KEPT = 2 * 86400.0  # seconds


@dataclass(frozen=True)
class History:
    """The known facts about the hosts; times are in seconds since the epoch.

    Attributes:
        hosts: the source's last good answer, in its order; empty only before the first one.
        listed: time of that answer; None before the first one.
        asked: time at which the source last answered or failed.
        failure: why the source's last answer was not good; an empty string if it was.
        empty: whether the failure is that no host was named.
        first_seen: since when each host is named.
        health: health of the hosts that were checked.
        healthy: the hosts that were healthy when at least one was.
        healthy_at: time of ``healthy``.
    """

    hosts: tuple[Host, ...] = ()
    listed: float | None = None
    asked: float | None = None
    failure: str = ""
    empty: bool = False
    first_seen: dict[str, float] = field(default_factory=dict)
    health: dict[str, Health] = field(default_factory=dict)
    healthy: tuple[str, ...] = ()
    healthy_at: float | None = None


def dumps(history: History) -> bytes:
    """Return the history as one line of JSON."""
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(history)}).encode()


def loads(text: bytes) -> History:
    """Return the history of a line of JSON; an empty one if the text is damaged or of another version."""
    try:
        values = json.loads(text)
        if values.pop("format") != _FORMAT:
            return History()
        values["hosts"] = tuple(Host(**each) for each in values["hosts"])
        values["health"] = {name: Health(**each) for name, each in values["health"].items()}
        values["healthy"] = tuple(values["healthy"])
        return History(**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return History()


class HistoryFile:
    """The file of a history.

    Args:
        path: its path; `lock` makes its folder when it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> History:
        """Return the history; an empty one without a usable file."""
        try:
            return loads(self._path.read_bytes())
        except OSError:
            return History()

    def write(self, history: History) -> None:
        """Replace the history.

        Raises:
            OSError: the file cannot be written.
        """
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f"{self._path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(dumps(history))
            Path(name).replace(self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def delete_old_files(self, now: float) -> None:
        """Delete other histories in the folder that have not been written for days."""
        with suppress(OSError):
            for path in self._path.parent.glob("?" * 16 + ".json"):
                # The folder may be the user's, with other files in it.
                if now - path.stat().st_mtime > _KEPT and path.read_bytes().startswith(_BEGINNING):
                    path.unlink()
                    _lock_of(path).unlink()

    @contextmanager
    def lock(self, *, wait: bool) -> Iterator[None]:
        """Hold the lock. The kernel releases it when its holder dies.

        Args:
            wait: whether to wait for it.

        Raises:
            BlockingIOError: another process holds it.
            OSError: the folder cannot be made or written to.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _lock_of(self._path).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
