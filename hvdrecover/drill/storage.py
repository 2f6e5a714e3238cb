"""A storage that is away, slow, flaky or full, as a drill says while jobs use it.

It keeps its files in a folder of this machine, under URLs ``hvdrecover-drill:///FOLDER``, which any process
can open: the file system is an entry point of fsspec. How it is to behave, its *mood*, is in a file beside
that folder, which every call looks at.
"""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.clock import SYSTEM_CLOCK, Clock

PROTOCOL = "hvdrecover-drill"
_LOOK = 0.05  # seconds after which a call that waits looks again whether the storage still is slow


@dataclass(frozen=True)
class Mood:
    """The behaviour of a storage.

    Attributes:
        away: whether every call fails, as of a server that can't be reached.
        full: whether nothing can be written, for lack of space.
        slow: seconds that every call takes longer.
        flaky: probability with which a call fails, as over a connection that breaks.
        seed: decides which calls fail: after each change of mood, the same ones of each process.
    """

    away: bool = False
    full: bool = False
    slow: float = 0.0
    flaky: float = 0.0
    seed: int = 0


def url(root: Path) -> str:
    """The URL of a checkpoint root in a folder, behind the storage that a drill rules."""
    return f"{PROTOCOL}://{root.absolute()}"


def mood(root: Path) -> Mood:
    """Return how the storage of a root behaves now."""
    try:
        return Mood(**json.loads(_mood_file(root).read_text()))
    except FileNotFoundError:
        return Mood()


def set_mood(root: Path, mood: Mood) -> None:
    """Have the storage of a root behave like this from the next call on, and calls that wait, too."""
    file = _mood_file(root)
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(asdict(mood)))
    new.replace(file)


def _mood_file(root: Path) -> Path:
    return root.with_name(f"{root.name}.mood")


class DrillFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of a folder; calls fail or take their time, as the mood is.

    What `pipe_file` writes appears whole, and exclusively if that is asked for, as with object stores; what
    is opened to be written appears as it grows. Nothing is fsynced: a drill kills processes, not machines.

    Args:
        root: the folder beside which the mood lies.
        clock: where times come from.
    """

    protocol = PROTOCOL

    def __init__(self, root: str, clock: Clock = SYSTEM_CLOCK, **options: Any) -> None:
        super().__init__(**options)
        self._files = LocalFileSystem()
        self._moods = _Moods(Path(root), clock)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return LocalFileSystem._strip_protocol(os.fspath(path).removeprefix(f"{PROTOCOL}://"))

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
        return {"root": DrillFileSystem._strip_protocol(url)}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what is directly below a folder, without what is still being made."""
        self._moods.obey()
        found = self._files.ls(self._strip_protocol(path), detail=True)
        shown = [info for info in found if not Path(info["name"]).name.startswith(TEMPORARY)]
        return shown if detail else [info["name"] for info in shown]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return what is known of a file or folder: name, size in bytes, type and more."""
        self._moods.obey()
        found: dict[str, Any] = self._files.info(self._strip_protocol(path))
        return found

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it."""
        self._moods.obey(writes=True)
        self._files.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write a file that is there either whole or not at all; unless it exists, with mode ``create``."""
        target = Path(self._strip_protocol(path))
        new = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        self._moods.obey(writes=True)
        try:
            new.write_bytes(value)
            if mode == "create":
                target.hardlink_to(new)
            else:
                new.replace(target)
        finally:
            new.unlink(missing_ok=True)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self._moods.obey()
        self._files.rm_file(self._strip_protocol(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file, or a folder and all below it."""
        self._moods.obey()
        self._files.rm(self._strip_protocol(path), recursive=recursive, maxdepth=maxdepth)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._moods.obey(writes=mode != "rb")
        return _File(self._files.open(path, mode), self._moods)


class _File:
    """An open file, of which each read and write is a call of its own."""

    def __init__(self, file: Any, moods: _Moods) -> None:
        self._file = file
        self._moods = moods

    def read(self, *arguments: Any) -> bytes:
        self._moods.obey()
        data: bytes = self._file.read(*arguments)
        return data

    def write(self, data: Any) -> int:
        self._moods.obey(writes=True)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class _Moods:
    """The mood as it is in its file, and what follows from it for a call."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._mood = Mood()
        self._chance = random.Random(0)

    def obey(self, *, writes: bool = False) -> None:
        """Return when a call is to continue.

        Args:
            writes: whether it needs space.

        Raises:
            OSError: it is to fail.
        """
        self._wait()
        mood, unlucky = self._look(draw=True)
        if mood.away:
            raise ConnectionError(errno.ECONNREFUSED, "the storage is away (a drill's doing)")
        if unlucky:
            raise ConnectionError(errno.ECONNRESET, "the connection to the storage broke (a drill's doing)")
        if mood.full and writes:
            raise OSError(errno.ENOSPC, "No space left on device (a drill's doing)")

    def _wait(self) -> None:
        begin, never = self._clock.monotonic(), threading.Event()
        while (left := begin + self._look()[0].slow - self._clock.monotonic()) > 0:
            self._clock.wait(never, min(left, _LOOK))

    def _look(self, *, draw: bool = False) -> tuple[Mood, bool]:
        """The mood now, and if a lot is drawn, whether the call is one of those that fail."""
        with self._lock:
            try:
                status = _mood_file(self._root).stat()
                seen = status.st_ino, status.st_mtime_ns
            except FileNotFoundError:
                seen = None
            if seen != self._seen:
                self._seen, self._mood = seen, mood(self._root)
                self._chance = random.Random(self._mood.seed)
            return self._mood, draw and self._chance.random() < self._mood.flaky
