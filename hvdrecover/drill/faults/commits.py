"""Faults of what lies at a checkpoint root."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint import root as roots
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.drill.faults.fault import Drilled, Plain
from hvdrecover.drill.faults.processes import kill_all
from hvdrecover.errors import DrillError
from hvdrecover.launch import processes

_TWO_COMMITS = 120.0  # seconds until a run must have made two durable commits
_STOPPED = 10.0  # seconds for processes to heed SIGSTOP, which a write to a disk may hold up
_LOOK = 0.01
_SPOILT = 16  # bytes


@dataclass(frozen=True)
class CorruptCommit(Plain):
    """A few bytes change in a data file of the newest complete commit, and all training processes are killed.

    They have to find it out by the digests, mark it, name it in the log, and resume from the one before.
    """

    name: ClassVar[str] = "corrupt-commit"
    summary: ClassVar[str] = "the newest durable commit is damaged, and all training processes are killed"

    def strike(self, run: Drilled, rank: int) -> None:
        """Change the bytes while all ranks are stopped, so that no newer commit comes up meanwhile.

        Raises:
            DrillError: two durable commits, of which one can be damaged, have not come in time.
        """
        _await_commits(run)
        stop_all(run)
        spoil_newest(run)
        kill_all(run)


def damaged(run: Drilled) -> set[str]:
    """The commits of a run's root that `CorruptCommit` has damaged; some may be deleted by now."""
    try:
        return set(_notes(run).read_text().split())
    except FileNotFoundError:
        return set()


def spoil_newest(run: Drilled) -> CommitId:
    """Change bytes in the middle of the largest file of the newest complete commit; return which it is."""
    newest = complete(run)[0]
    with _notes(run).open("a") as notes:
        notes.write(f"{newest.name}\n")
    spoil(run.root / newest.name)
    return newest


def spoil(commit: Path) -> None:
    """Change bytes in the middle of the largest file of the commit in a folder."""
    files = sorted(commit.glob(f"*{manifests.TENSORS}"), key=lambda path: path.stat().st_size)
    with files[-1].open("r+b") as file:
        file.seek((files[-1].stat().st_size - _SPOILT) // 2)
        before = file.read(_SPOILT)
        file.seek(-_SPOILT, os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in before))


def complete(run: Drilled) -> list[CommitId]:
    """The complete commits of a run's root that nobody has found broken, newest first."""
    root = LocalStorage(run.root)
    return [
        commit
        for commit in roots.commits(root)
        if roots.is_complete(root, commit) and not roots.is_quarantined(root, commit)
    ]


def _notes(run: Drilled) -> Path:
    return run.folder / f"{CorruptCommit.name}-damaged"


def _await_commits(run: Drilled) -> None:
    deadline = time.monotonic() + _TWO_COMMITS
    while len(complete(run)) < 2:
        if time.monotonic() > deadline:
            problem = f"two durable commits at a time were not there in {_TWO_COMMITS:.0f} s"
            remedy = "the script must keep more than one (keep=2), and make them more often"
            raise DrillError(os.fspath(run.folder), f"{problem}; for '{CorruptCommit.name}' {remedy}")
        time.sleep(_LOOK)


def stop_all(run: Drilled) -> None:
    """SIGSTOP all training processes, and wait until they are; those that have ended don't matter."""
    deadline = time.monotonic() + _STOPPED
    for process in [run.process_of(rank) for rank in run.ranks()]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            while not processes.is_stopped(process) and time.monotonic() < deadline:
                os.kill(process, 0)
                time.sleep(_LOOK)
