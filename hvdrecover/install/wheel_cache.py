"""Built wheels, kept per user and found again by what they were built for.

::

    ${XDG_CACHE_HOME:-~/.cache}/hvdrecover/wheels/
      hvdrecover.k3x…/                  one folder per build label
        horovod-0.28.1+hvdrecover.k3x….whl
        build.log
      hvdrecover.k3x….lock              held by whoever is building it

Each change of a framework, of Python or of the edits makes another build of some 40 MB; `prune` keeps the
ones that were used last.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdrecover import config
from hvdrecover.errors import InstallError

#: Seconds to wait for another process that builds the same wheel.
LOCK_TIMEOUT = 2 * 60 * 60.0
#: Builds that are kept for one user.
KEPT_BUILDS = 8


@dataclass(frozen=True)
class BuildSpec:
    """Everything that a built wheel depends on; two equal specs can share a wheel.

    Attributes:
        python: the interpreter's tag, such as ``cp311``.
        platform: operating system, architecture, C library and CPU features.
        horovod: Horovod's version.
        edits: digest of the edits to its source.
        torch: PyTorch's version with its local part, or None to build without it.
        tensorflow: TensorFlow's distribution and version, or None to build without it.
        mpi: which MPI the wheel is linked to, or ``none``.
        cuda: the CUDA compiler that the build will find, or None.
        settings: (name, value) of the environment variables that steer the build, sorted.
    """

    python: str
    platform: str
    horovod: str
    edits: str
    torch: str | None
    tensorflow: str | None
    mpi: str
    cuda: str | None
    settings: tuple[tuple[str, str], ...]


def label(spec: BuildSpec) -> str:
    """Return the local version label of a build, such as ``hvdrecover.k3xq5cjz2a``.

    The digest is in base 32, whose digits have no zero: version normalisation would strip leading ones.
    """
    digest = hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).digest()
    return "hvdrecover." + base64.b32encode(digest).decode().lower()[:10]


def version(spec: BuildSpec) -> str:
    """Return the version of the wheel of a build, such as ``0.28.1+hvdrecover.k3xq5cjz2a``."""
    return f"{spec.horovod}+{label(spec)}"


def wheels_root(environ: Mapping[str, str]) -> Path:
    """Return the folder that holds all built wheels of this user."""
    return config.cache(environ) / "wheels"


def is_intact(wheel: Path) -> bool:
    """Return whether a wheel is a complete archive whose members all have the right checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError):
        return False


def find(folder: Path) -> Path | None:
    """Return the intact wheel in a build's folder, if there is one; damaged ones are removed."""
    for wheel in sorted(folder.glob("horovod-*.whl")):
        if is_intact(wheel):
            return wheel
        wheel.unlink(missing_ok=True)
    return None


def publish(wheel: Path, folder: Path) -> Path:
    """Put a freshly built wheel into its folder in the cache, as a whole; return its new path.

    Raises:
        InstallError: the wheel is damaged.
    """
    if not is_intact(wheel):
        raise InstallError(f"{wheel}: the build left a damaged wheel; is the disk full? Run it again.")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    partial = folder / f".{wheel.name}.{os.getpid()}.partial"
    try:
        shutil.copyfile(wheel, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def prune(root: Path, current: Path, keep: int = KEPT_BUILDS) -> list[Path]:
    """Delete all but the ``keep`` builds that were used last; return their folders.

    The ``current`` build stays, and so does any that another process uses. An installation writes its log
    into the folder of its build, so the folder's time is the time of its last use.
    """
    others = {
        folder: folder.stat().st_mtime
        for folder in root.glob("hvdrecover.*")
        if folder.is_dir() and folder != current
    }
    deleted = []
    for folder in sorted(others, key=lambda each: (others[each], each), reverse=True)[keep - 1 :]:
        try:
            with locked(folder, lambda: None, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except (InstallError, OSError):
            continue
        deleted.append(folder)
    return deleted


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None], timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold the lock of a build's folder, so that one wheel is not built by two processes at a time.

    Args:
        folder: the build's folder in the cache; it need not exist.
        on_wait: called once, when another process holds the lock.
        timeout: how long to wait for that process, in seconds.

    Raises:
        InstallError: the other process did not finish in time.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f"{folder.name}.lock"
    deadline = time.monotonic() + timeout
    with lock.open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    waiting = True
                    on_wait()
                if time.monotonic() >= deadline:
                    raise InstallError(
                        f"{lock}: another process has held this lock for {timeout:.0f} s. "
                        "Look whether it still builds Horovod, end it if not, and run this again."
                    ) from None
                time.sleep(0.5)
        yield  # closing the file gives the lock back
