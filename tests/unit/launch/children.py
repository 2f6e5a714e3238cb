"""Real child processes, and waiting for what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.support.commands import LAUNCHER_VARIABLES

DEADLINE = 60.0  # seconds; only reached when something is broken
Found = TypeVar("Found")


def until(look: Callable[[], Found], what: str) -> Found:
    """Look again and again until there is something; fail if there never is."""
    give_up = time.monotonic() + DEADLINE
    while not (found := look()):
        assert time.monotonic() < give_up, f"waited in vain: {what}"
        time.sleep(0.005)
    return found


def environment() -> dict[str, str]:
    """This process's environment, without what launchers leave there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}


@contextmanager
def child(code: str, *arguments: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process with its output in a pipe; ended in the end, or when the test takes too long."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        **{"stdout": subprocess.PIPE, "text": True, "env": environment(), **options},  # type: ignore[call-overload]
    )
    limit = threading.Timer(2 * DEADLINE, process.kill)  # whoever reads its output then finds the end
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a child prints; it fails if there is none."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text.endswith("\n"), f"the child has ended, and printed {text!r}"
    return text.rstrip("\n")


def is_alive(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return state(process) not in ("Z", "X")
    except FileNotFoundError:
        return False


def state(process: int) -> str:
    """A process's state, as the kernel has it: R, S, T, Z, …."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def gone(process: int) -> None:
    """Wait until a process is gone."""
    until(lambda: not is_alive(process), f"process {process} is to be gone")


def descriptors(process: int | str = "self") -> dict[int, str]:
    """Return what a process has open, by descriptor; without the one that this looks with."""
    found = {}
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue
    return found
