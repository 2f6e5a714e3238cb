"""The steps in which a process changes a checkpoint root: its system calls, each of which it can die at."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

When = Literal["before", "middle"]
_PAGE = 4096
_TEMPORARY = re.compile(r"\.hvdrecover-[\w-]+")


@dataclass(frozen=True)
class Step:
    """One change.

    Attributes:
        verb: the system call.
        path: what it changes, relative to the root.
        to: the second path of a link or a rename.
        start: the first byte of a write; the new size of a truncation.
        data: what is written.
    """

    verb: str
    path: str
    to: str = ""
    start: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        text = f"{self.verb} {self.path} {self.to}".strip()
        return _TEMPORARY.sub("TEMPORARY", text)


class Traced:
    """Makes this process note each change that it is about to make below a folder, and die at one of them.

    Args:
        root: the folder.
        note: takes each step before it is done.
        die_at: number of the step, from 0, at which the process is killed; None for never.
        when: whether it is killed before that step, or with half of a write done.
    """

    def __init__(
        self, root: Path, note: Callable[[Step], None], die_at: int | None = None, when: When = "before"
    ) -> None:
        self._root = root
        self._note = note
        self._die_at = die_at
        self._when = when
        self._count = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        """Replace the functions of `os` through which Python code changes files."""
        for name in ("ftruncate", "fsync", "pwrite", "write", "open"):
            self._wrap(name, getattr(self, f"_{name}"))
        for name in ("unlink", "rmdir", "mkdir"):
            self._wrap(name, lambda call, *args, verb=name, **kw: self._by_name(verb, call, *args, **kw))
        for name in ("link", "rename", "replace"):
            self._wrap(name, lambda call, *args, verb=name, **kw: self._two_names(verb, call, *args, **kw))
        io_open = io.open
        # `Path.open` goes to C at once; this way it comes by here.
        io.open = lambda file, mode="r", *args, **kw: (
            _Raw(file, mode) if "x" in mode or "w" in mode else io_open(file, mode, *args, **kw)
        )

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        call = getattr(os, name)
        setattr(os, name, lambda *args, **kw: wrapper(call, *args, **kw))

    def _do(self, step: Step, call: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._note(step)
            if number == self._die_at:
                if half is not None and self._when == "middle":
                    half()
                os.kill(os.getpid(), signal.SIGKILL)
            return call()

    def _named(self, path: Any, folder: int | None = None) -> str | None:
        """A path relative to the root, or None if it lies elsewhere."""
        if isinstance(path, int):
            path = _behind(path)
        elif folder is not None:
            path = _behind(folder) / path
        absolute = Path(path).absolute()
        return absolute.relative_to(self._root).as_posix() if absolute.is_relative_to(self._root) else None

    def _open(self, call: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        named = self._named(path, dir_fd)
        if named is None or not flags & os.O_CREAT:
            return call(path, flags, mode, dir_fd=dir_fd)
        assert not flags & os.O_TRUNC, "the model of a disk knows no truncation by opening"
        return self._do(Step("open", named), lambda: call(path, flags, mode, dir_fd=dir_fd))

    def _ftruncate(self, call: Any, file: int, size: int) -> Any:
        step = Step("ftruncate", self._named(file) or "", start=size)
        return self._do(step, lambda: call(file, size))

    def _fsync(self, call: Any, file: int) -> Any:
        named = self._named(file)
        return self._do(Step("fsync", named), lambda: call(file)) if named else call(file)

    def _pwrite(self, call: Any, file: int, data: Any, start: int) -> Any:
        step = Step("write", self._named(file) or "", start=start, data=bytes(data))
        return self._do(step, lambda: call(file, data, start), lambda: call(file, _half(file, data), start))

    def _write(self, call: Any, file: int, data: Any) -> Any:
        named = self._named(file)
        if named is None:
            return call(file, data)
        step = Step("write", named, start=os.lseek(file, 0, os.SEEK_CUR), data=bytes(data))
        return self._do(step, lambda: call(file, data), lambda: call(file, _half(file, data)))

    def _by_name(self, verb: str, call: Any, path: Any, *args: Any, dir_fd: int | None = None) -> Any:
        named = self._named(path, dir_fd)
        if named is None or os.path.lexists(self._root / named) == (verb == "mkdir"):
            return call(path, *args, dir_fd=dir_fd)  # changes nothing here
        return self._do(Step(verb, named), lambda: call(path, *args, dir_fd=dir_fd))

    def _two_names(self, verb: str, call: Any, source: Any, target: Any, **kw: Any) -> Any:
        step = Step(verb, self._named(source) or "", to=self._named(target) or "")
        return self._do(step, lambda: call(source, target, **kw))


def _behind(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


class _Raw(io.FileIO):
    """A file whose making and writing go through `os`."""

    def __init__(self, path: Any, mode: str) -> None:
        super().__init__(path, mode.replace("b", ""), opener=lambda name, flags: os.open(name, flags, 0o666))

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)


def _half(file: int, data: Any) -> Any:
    """Half of what is to be written; in whole pages for a file that is open past the page cache."""
    half = len(data) // 2
    return data[: half // _PAGE * _PAGE if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT else half]
