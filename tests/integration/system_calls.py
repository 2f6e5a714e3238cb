"""The steps in which a process changes a checkpoint root: its system calls, each of which it can die at.

`Disk` is a model of a disk whose power may fail. Content that was not fsynced may be missing, stale or torn;
an entry of a folder that was not fsynced may be as before or as after, each by itself.
"""

from __future__ import annotations

import fcntl
import io
import os
import random
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Survives = Literal["nothing", "names", "some"]
"""Of what was not fsynced: nothing, all names without their content, or some of each."""

When = Literal["before", "middle"]
_PAGE = 4096
_TEMPORARY = re.compile(r"\.hvdrecover-[\w-]+")


@dataclass(frozen=True)
class Step:
    verb: str  # the system call
    path: str  # what it changes, relative to the root
    to: str = ""  # the second path of a link or a rename
    start: int = 0  # the first byte of a write; the new size of a truncation
    data: bytes = b""  # what is written

    def __str__(self) -> str:
        text = f"{self.verb} {self.path} {self.to}".strip()
        return _TEMPORARY.sub("TEMPORARY", text)


class Traced:
    """Notes each change below a folder, and kills this process before the step `die_at` or within it."""

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


# -- a disk whose power fails ----------------------------------------------------------------------------


@dataclass
class File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """The contents of a root in memory and on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = _load(root)

    def apply(self, step: Step) -> None:
        """Do what one system call does."""
        folder, name = self._parent(step.path)
        match step.verb:
            case "open":
                assert isinstance(folder.now.setdefault(name, File()), File)
            case "mkdir":
                folder.now[name] = Folder()
            case "unlink" | "rmdir":
                del folder.now[name]
            case "link" | "rename" | "replace":
                target, new = self._parent(step.to)
                target.now[new] = folder.now[name] if step.verb == "link" else folder.now.pop(name)
            case "fsync":
                node = self._node(step.path)
                if isinstance(node, File):
                    node.durable = bytes(node.now)
                else:
                    node.durable = dict(node.now)
            case "ftruncate" | "write":
                node = self._node(step.path)
                assert isinstance(node, File)
                end = step.start + len(step.data)
                node.now.extend(bytes(max(0, end - len(node.now))))
                if step.verb == "write":
                    node.now[step.start : end] = step.data
                else:
                    del node.now[end:]
            case _:
                raise AssertionError(f"the model knows no {step.verb}")

    def power_fails(self, into: Path, survives: Survives, dice: random.Random) -> None:
        """Make the folder that is found when the power is back."""
        _restore(self._root, into, survives, dice)

    def content(self) -> dict[str, bytes]:
        """Every file as the running system sees it."""
        found: dict[str, bytes] = {}

        def walk(folder: Folder, path: str) -> None:
            for name, node in folder.now.items():
                if isinstance(node, Folder):
                    walk(node, f"{path}{name}/")
                else:
                    found[path + name] = bytes(node.now)

        walk(self._root, "")
        return found

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        node = self._node(folder or ".")
        assert isinstance(node, Folder)
        return node, name

    def _node(self, path: str) -> File | Folder:
        node: File | Folder = self._root
        for part in Path(path).parts:
            assert isinstance(node, Folder)
            node = node.now[part]
        return node


def _load(path: Path) -> Folder:
    entries: dict[str, File | Folder] = {}
    for entry in path.iterdir():
        content = b"" if entry.is_dir() else entry.read_bytes()
        entries[entry.name] = _load(entry) if entry.is_dir() else File(bytearray(content), content)
    return Folder(entries, dict(entries))


def _restore(folder: Folder, into: Path, survives: Survives, dice: random.Random) -> None:
    into.mkdir()
    for name in sorted({*folder.now, *folder.durable}):
        entries = folder.durable if survives == "nothing" else folder.now
        if survives == "some":
            entries = dice.choice([folder.durable, folder.now])
        node = entries.get(name)
        if isinstance(node, Folder):
            _restore(node, into / name, survives, dice)
        elif node is not None:
            (into / name).write_bytes(_content(node, survives, dice))


def _content(file: File, survives: Survives, dice: random.Random) -> bytes:
    if survives != "some" or file.now == file.durable:
        return file.durable
    torn = dice.randrange(len(file.now) + 1)
    return dice.choice([file.durable, bytes(file.now), bytes(file.now[:torn]).ljust(len(file.now), b"\0")])
