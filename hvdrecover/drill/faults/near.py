"""Faults of the near tier: commits in the memory of hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdrecover import config
from hvdrecover.checkpoint import root as roots
from hvdrecover.checkpoint.near import place
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.drill.faults.commits import spoil, stop_all
from hvdrecover.drill.faults.fault import Drilled, Plain
from hvdrecover.drill.faults.processes import kill_all
from hvdrecover.errors import DrillError

_A_COMMIT = 60.0  # seconds until a run must have sealed a near commit
_LOOK = 0.01
_SYS_ADMIN = 21  # linux/capability.h
_ROOM = "50%"  # of the machine's memory; only what is written takes any


@dataclass(frozen=True)
class CorruptNear(Plain):
    """A few bytes change in the newest near commit, and all training processes are killed.

    They have to find it out by the digests, pass it over with a line, and resume from the near commit before
    or from the durable one.
    """

    name: ClassVar[str] = "corrupt-near"
    summary: ClassVar[str] = "the newest commit in the host's memory is damaged, and all processes are killed"

    def strike(self, run: Drilled, rank: int) -> None:
        """Change the bytes while all ranks are stopped, so that none seals a newer commit meanwhile.

        Raises:
            DrillError: the run has sealed no near commit in time.
        """
        deadline = time.monotonic() + _A_COMMIT
        while not self._spoil(run):
            if time.monotonic() > deadline:
                problem = f"'{self.name}' found no commit in the host's memory in {_A_COMMIT:.0f} s"
                remedy = "see the log's line 'near tier: off' for why, or leave the fault out"
                raise DrillError(os.fspath(run.folder), f"{problem}; {remedy}")
            time.sleep(_LOOK)
        kill_all(run)

    def _spoil(self, run: Drilled) -> bool:
        if not sealed(run):
            return False
        stop_all(run)
        found = sealed(run)  # the one seen before may have been opened for the next commit
        for path in found[:1]:
            spoil(path)
        if not found:
            kill_all(run)  # so that they don't stay stopped; those that come seal others
        return bool(found)


@dataclass(frozen=True)
class TmpfsFull(Plain):
    """The file system of the near tier has no space left, and all training processes are killed.

    They resume from a commit that is there, and train on; commits go to memory and to the checkpoint root.
    """

    name: ClassVar[str] = "tmpfs-full"
    summary: ClassVar[str] = "the file system of commits in the host's memory is full, and all are killed"
    lasting: ClassVar[bool] = True

    def lacks(self, run: Drilled) -> str:
        """Return whether this user may mount a file system."""
        if shutil.which("mount") is None or not _may_mount():
            return "only root may mount a file system of the drill's own; use sudo, a container --privileged"
        return ""

    def prepare(self, run: Drilled) -> dict[str, str]:
        """Mount a file system of the run's own, and have the near tier there.

        Raises:
            DrillError: it can't be mounted.
        """
        folder = _mount(run)
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_mount():
            _call(run, "mount", "-t", "tmpfs", "-o", f"mode=700,size={_ROOM}", "tmpfs", os.fspath(folder))
        return {"HVDRECOVER_NEAR": os.fspath(folder)}

    def strike(self, run: Drilled, rank: int) -> None:
        """Make the file system as small as what it holds.

        Raises:
            DrillError: it can't be made so.
        """
        deadline = time.monotonic() + _A_COMMIT
        while True:
            status = os.statvfs(_mount(run))
            used = max(1, status.f_blocks - status.f_bfree) * status.f_frsize
            try:
                self._resize(run, str(used))
                break
            except DrillError:  # more was written meanwhile
                if time.monotonic() > deadline:
                    raise
        kill_all(run)

    def end(self, run: Drilled) -> None:
        """Let there be space."""
        if _mount(run).is_mount():
            self._resize(run, _ROOM)

    def clean_up(self, run: Drilled) -> None:
        """Take the file system away."""
        if _mount(run).is_mount():
            _call(run, "umount", "--lazy", os.fspath(_mount(run)))

    def _resize(self, run: Drilled, size: str) -> None:
        _call(run, "mount", "-o", f"remount,size={size}", os.fspath(_mount(run)))


def sealed(run: Drilled) -> list[Path]:
    """The near commits of a run, newest first."""
    found = []
    for path in _roots(run):
        root = LocalStorage(path)
        found += [(each, path / each.name) for each in roots.commits(root) if roots.is_complete(root, each)]
    return [path for _, path in sorted(found, reverse=True)]


def forget(run: Drilled) -> None:
    """Delete what a run that was killed has left in this host's memory."""
    for path in _roots(run):
        with suppress(OSError):
            place.remove(path)


def _roots(run: Drilled) -> list[Path]:
    """Those of the run's checkpoint root, by whichever URL it is named."""
    bases = [config.read().near, os.fspath(_mount(run))]
    found = [each for base in bases if base != "off" for each in place.roots(base)]
    return [each.path for each in found if each.url.endswith(f"://{run.root}")]


def _may_mount() -> bool:
    (effective,) = re.findall(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(int(effective, 16) >> _SYS_ADMIN & 1)


def _mount(run: Drilled) -> Path:
    return run.folder / "tmpfs"


def _call(run: Drilled, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise DrillError(os.fspath(run.folder), f"{' '.join(command)} failed: {done.stderr.strip()}")
