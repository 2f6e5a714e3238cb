"""The history of host discovery, from one call to the next, in a file that calls may share.

Who holds the file's lock may write it; it is replaced as a whole, so that anybody may read it at any time.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvdrecover.discovery.health import Health
from hvdrecover.discovery.hosts import Host

_FORMAT = 2
_BEGINNING = b'{"format": '
_NAME = re.compile(r"[0-9a-f]{16}\.json")
_KEPT = 2 * 86400.0  # seconds


@dataclass(frozen=True)
class History:
    """The facts known about the hosts; times in seconds since the epoch.

    Attributes:
        hosts: what the source has named last, in its order; never empty after its first good answer.
        listed: when that was; None before the first good answer.
        asked: when the source was asked last, and has answered or failed.
        failure: why the last answer was none; an empty string if it was one.
        empty: whether that is because no host was named.
        first_seen: since when each host is named.
        health: of those that were checked.
        healthy: the hosts that were healthy when last any was.
        healthy_at: when that was.
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


class HistoryFile:
    """The file.

    Args:
        path: where it lies; its folder is made when missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> History:
        """Return the history; an empty one if there is no file, or one of another origin."""
        try:
            text = self._path.read_bytes()
        except OSError:
            return History()
        try:
            return loads(text)
        except (ValueError, TypeError, KeyError, AttributeError):
            return History()

    def write(self, history: History) -> None:
        """Remember this instead.

        Raises:
            OSError: it can't be written.
        """
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f"{self._path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(dumps(history))
            Path(name).replace(self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def forget_others(self, now: float) -> None:
        """Remove the files beside this one that nobody has written for days."""
        with suppress(OSError):
            for path in filter(_is_ours, self._path.parent.iterdir()):
                if now - path.stat().st_mtime > _KEPT:
                    path.unlink()
                    _lock_of(path).unlink()

    @contextmanager
    def lock(self, *, wait: bool) -> Iterator[None]:
        """Hold the lock, which the kernel lets go of when its holder dies.

        Args:
            wait: whether to wait for it.

        Raises:
            BlockingIOError: somebody holds it.
            OSError: the folder can't be made or written to.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _lock_of(self._path).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield


def _is_ours(path: Path) -> bool:
    """Return whether a file is a history: the folder may be the user's, with other files in it."""
    if _NAME.fullmatch(path.name) is None:
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def dumps(history: History) -> bytes:
    """As JSON, on one line."""
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(history)}).encode()


def loads(text: bytes) -> History:
    """From JSON; nothing is known if it was written by another version.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none of ours.
    """
    values = json.loads(text)
    if values.pop("format") != _FORMAT:
        return History()
    values["hosts"] = tuple(Host(**each) for each in values["hosts"])
    values["health"] = {name: Health(**each) for name, each in values["health"].items()}
    values["healthy"] = tuple(values["healthy"])
    return History(**values)
