"""A storage that fails on demand: the fsspec file system ``hvdrecover-drill:///FOLDER``.

It keeps its files in a folder of this machine. A file beside that folder says how the storage behaves; each
call reads it, so any process can change the behaviour of a running job's storage. A file that is already open
can still be read and written.
"""

from __future__ import annotations

import errno
import uuid
from pathlib import Path
from typing import Any, Literal

from fsspec.implementations.local import LocalFileSystem

from hvdrecover.checkpoint.storage import TEMPORARY

PROTOCOL = "hvdrecover-drill"
Behaviour = Literal["well", "away", "full"]


def url(root: Path) -> str:
    return f"{PROTOCOL}://{root.absolute()}"


def set_behaviour(root: Path, behaviour: Behaviour) -> None:
    """Set how the storage of a root behaves: ``away`` fails every call, ``full`` fails writes."""
    file = _behaviour_file(root)
    new = file.with_name(f"{file.name}.new")
    new.write_text(behaviour)
    new.replace(file)


def _behaviour_file(root: Path) -> Path:
    return root.with_name(f"{root.name}.behaviour")


class DrillFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The files of a folder; calls fail as the behaviour says.

    As with object stores, `pipe_file` writes a file completely or not at all, and with ``mode="create"`` only
    if it does not exist. Nothing is fsynced: a drill kills processes, not machines.
    """

    protocol = PROTOCOL

    def __init__(self, root: str, **options: Any) -> None:
        super().__init__(**options)
        self._behaviour = _behaviour_file(Path(root))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        # fsspec before 2026.4 strips only `file:` and `local:`, and would take the URL for a relative path.
        return super()._strip_protocol(path.removeprefix(f"{PROTOCOL}://") if isinstance(path, str) else path)

    @classmethod
    def _get_kwargs_from_urls(cls, url: str) -> dict[str, Any]:
        return {"root": cls._strip_protocol(url)}

    def check(self, *, writes: bool = False) -> None:
        behaviour = self._behaviour.read_text() if self._behaviour.exists() else "well"
        if behaviour == "away":
            raise ConnectionError(errno.ECONNREFUSED, "the storage is away (simulated by a drill)")
        if behaviour == "full" and writes:
            raise OSError(errno.ENOSPC, "No space left on device (simulated by a drill)")

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self.check()
        found = super().ls(self._strip_protocol(path), detail=True)
        shown = [info for info in found if not Path(info["name"]).name.startswith(TEMPORARY)]
        return shown if detail else [info["name"] for info in shown]

    def info(self, path: Any, **options: Any) -> Any:
        self.check()
        return super().info(path, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.check(writes=True)
        super().makedirs(path, exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
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
        self.check()
        super().rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.check()
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.check(writes=mode != "rb")
        return super()._open(path, mode, **options)
