"""A storage that fails on demand: the fsspec file system ``hvdrecover-drill:///FOLDER``.

It keeps its files in a folder of this machine. A file beside that folder says how the storage behaves; each
call reads it, so any process can change the behaviour of a running job's storage.
"""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import Any, Literal

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from hvdrecover.checkpoint.storage.interface import TEMPORARY

PROTOCOL = "hvdrecover-drill"
Behaviour = Literal["well", "away", "full"]


def url(root: Path) -> str:
    """Return the URL of a checkpoint root in a folder, behind this file system."""
    return f"{PROTOCOL}://{root.absolute()}"


def set_behaviour(root: Path, behaviour: Behaviour) -> None:
    """Set how the storage of a root behaves from the next call on.

    Args:
        root: the folder of the root.
        behaviour: ``away`` fails every call; ``full`` fails those that write; ``well`` fails none.
    """
    file = _behaviour_file(root)
    new = file.with_name(f"{file.name}.new")
    new.write_text(behaviour)
    new.replace(file)


def _behaviour_file(root: Path) -> Path:
    return root.with_name(f"{root.name}.behaviour")


class DrillFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of a folder; calls fail as the behaviour says.

    As with object stores, `pipe_file` writes a file completely or not at all, and with ``mode="create"`` only
    if it does not exist. Nothing is fsynced: a drill kills processes, not machines.

    Args:
        root: the folder beside which the behaviour is kept.
    """

    protocol = PROTOCOL

    def __init__(self, root: str, **options: Any) -> None:
        super().__init__(**options)
        self._files = LocalFileSystem()
        self._behaviour = _behaviour_file(Path(root))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return LocalFileSystem._strip_protocol(os.fspath(path).removeprefix(f"{PROTOCOL}://"))

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
        return {"root": DrillFileSystem._strip_protocol(url)}

    def check(self, *, writes: bool = False) -> None:
        """Raise the error with which a call is to fail, if it is."""
        try:
            behaviour = self._behaviour.read_text()
        except FileNotFoundError:
            return
        if behaviour == "away":
            raise ConnectionError(errno.ECONNREFUSED, "the storage is away (simulated by a drill)")
        if behaviour == "full" and writes:
            raise OSError(errno.ENOSPC, "No space left on device (simulated by a drill)")

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the entries of a folder, without files that are not complete yet."""
        self.check()
        found = self._files.ls(self._strip_protocol(path), detail=True)
        shown = [info for info in found if not Path(info["name"]).name.startswith(TEMPORARY)]
        return shown if detail else [info["name"] for info in shown]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return name, size in bytes, type and more of a file or folder."""
        self.check()
        found: dict[str, Any] = self._files.info(self._strip_protocol(path))
        return found

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and its parents."""
        self.check(writes=True)
        self._files.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write a whole file; with mode ``create`` only if it does not exist."""
        self.check(writes=True)
        target = Path(self._strip_protocol(path))
        new = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
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
        self.check()
        self._files.rm_file(self._strip_protocol(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file, or a folder with its content."""
        self.check()
        self._files.rm(self._strip_protocol(path), recursive=recursive, maxdepth=maxdepth)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.check(writes=mode != "rb")
        return _File(self._files.open(path, mode), self)


class _File:
    """An open file whose reads and writes can fail, too."""

    def __init__(self, file: Any, storage: DrillFileSystem) -> None:
        self._file = file
        self._storage = storage

    def read(self, *arguments: Any) -> bytes:
        self._storage.check()
        data: bytes = self._file.read(*arguments)
        return data

    def write(self, data: Any) -> int:
        self._storage.check(writes=True)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
