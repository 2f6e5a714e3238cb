"""The cache of built wheels, one folder for each build label.

::

    ${XDG_CACHE_HOME:-~/.cache}/hvdrecover/wheels/
      hvdrecover.k3x…/                  one folder per build label
        horovod-0.28.1+hvdrecover.k3x….whl
        build.log
      hvdrecover.k3x….lock              held by the process that builds it

Each change of a framework, of Python or of the edits makes another build of some 40 MB. `prune` keeps the
builds that were used last.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvdrecover import config

KEPT_BUILDS = 8  # of one user


def label(facts: Mapping[str, object]) -> str:
    """Return the local version label of a build, such as ``hvdrecover.k3xq5cjz2a``, from its facts."""
    # Base 32 has no digit zero: version normalisation would strip leading ones.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return "hvdrecover." + base64.b32encode(digest).decode().lower()[:10]


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
    """Copy a new wheel into its folder in the cache, where it appears as a whole; return its new path."""
    partial = folder / f".{wheel.name}.partial"  # only the holder of the folder's lock writes it
    shutil.copyfile(wheel, partial)
    return partial.replace(folder / wheel.name)


def prune(current: Path, keep: int = KEPT_BUILDS) -> None:
    """Delete all but the ``keep`` builds that were used last; the ``current`` one and builds in use stay."""
    # An installation writes its log into the folder of its build, so the folder's time tells its last use.
    others = [each for each in current.parent.glob("hvdrecover.*") if each.is_dir() and each != current]
    others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in others[keep - 1 :]:
        try:
            with locked(folder, _give_up):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


@contextmanager
def locked(folder: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of a build's folder, so that two processes never build one wheel at the same time.

    `on_wait` is called before waiting for another process that holds the lock; it may raise instead.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _give_up() -> None:
    raise BlockingIOError
