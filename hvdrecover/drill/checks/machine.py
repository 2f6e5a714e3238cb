"""Does a run leave anything behind, and does anything grow?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.differences import some
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.launch import processes

_FILES = 8  # open files that may come and go with a standby: most of them while it is started
_MEMORY = 1.25  # by which factor a process may grow until it counts as growing
_SHARED = "/dev/shm/"
_LEAST = 6  # sizes of a process that tell whether it grows


@dataclass(frozen=True)
class Size:
    """The resources of a process: number of open files, and resident memory in bytes."""

    files: int
    memory: int


def size_of(process: int) -> Size | None:
    """Return what a process takes now; None if it is gone."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return Size(len(list(Path(f"/proc/{process}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return None


def shared_memory(process: int) -> set[int]:
    """The inodes of files in shared memory that a process has mapped; their names may have changed since."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if _SHARED in line}


def orphans(left: Sequence[int]) -> list[Finding]:
    """No process outlives the run."""
    if not left:
        return []
    words = "; ".join(f"{process} ({' '.join(processes.command(process))[:80]})" for process in left)
    return [Finding(rules.NO_PROCESSES, f"after the run's end these still ran: {words}")]


def leftovers(mapped: Set[int]) -> list[Finding]:
    """Nothing is left in shared memory of what processes of the run had mapped.

    Args:
        mapped: inodes.
    """
    left = []
    for file in Path(_SHARED).iterdir() if mapped else ():
        with suppress(OSError):  # it is gone by now
            left += [file.name] if file.stat().st_ino in mapped else []
    return [Finding(rules.NO_SHARED_MEMORY, f"/dev/shm still holds {some(left)}")] if left else []


def growth(sizes: Sequence[Sequence[Size]]) -> list[Finding]:
    """Return what lives through all faults does not grow with them.

    Args:
        sizes: for each process its sizes after each fault.
    """
    for each in sizes:
        if len(each) < _LEAST:
            continue
        half = len(each) // 2
        files = [max(size.files for size in part) for part in (each[:half], each[half:])]
        memory = [max(size.memory for size in part) for part in (each[:half], each[half:])]
        if files[1] > files[0] + _FILES or memory[1] > memory[0] * _MEMORY:
            message = (
                "from the first half of the faults to the second, a process that lives through them went "
                f"from {files[0]} to {files[1]} open files, and from {memory[0] >> 20} to {memory[1] >> 20} "
                "MiB"
            )
            return [Finding(rules.NO_GROWTH, message)]
    return []


def exits(code: int, expected: int) -> list[Finding]:
    """The last start ends with the code that a scheduler needs: 0 at the end, 75 after a preemption."""
    if code == expected:
        return []
    return [Finding(rules.EXIT_CODES, f"the job ended with exit code {code} instead of {expected}")]


def root(url: str, damaged: set[str]) -> list[Finding]:
    """Check that the checkpoint root is whole, but for commits that the drill has damaged itself."""
    command = [sys.executable, "-m", "hvdrecover", "verify", url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        commits = json.loads(done.stdout)["commits"]
    except (ValueError, KeyError):
        return [Finding(rules.ROOT, done.stderr.strip()[-500:])]
    broken = [each["commit"] for each in commits if not each["intact"] and each["commit"] not in damaged]
    if not broken and len(commits) > len(damaged):
        return []
    return [
        Finding(rules.ROOT, f"these commits are broken: {some(broken)}" if broken else "it holds no commit")
    ]
