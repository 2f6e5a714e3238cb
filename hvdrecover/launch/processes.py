"""Processes that don't outlive who started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_TIDYING = 5.0  # seconds
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when its parent dies.

    The kernel means the parent's thread that has started this process, so only main threads may do that.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    hand_down: Sequence[int] = (),
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process that the kernel kills when this one dies; in a process group of its own.

    Args:
        command: program and arguments.
        environ: its environment.
        hand_down: file descriptors that it keeps, under their numbers.
        stdin: as for `subprocess.Popen`.
        stdout: as for `subprocess.Popen`.
        stderr: as for `subprocess.Popen`.
        new_session: whether it is to be apart from this process's terminal.

    Raises:
        OSError: the program can't be started.
    """
    return subprocess.Popen(
        list(command),
        env=dict(environ),
        pass_fds=tuple(hand_down),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
        process_group=None if new_session else 0,
        preexec_fn=_dies_with(os.getpid()),
    )


def _dies_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died in between
            os._exit(1)

    return prepare


def kill_group(process: int) -> None:
    """SIGKILL a process group that `start` has made, whether its first process still lives or not."""
    try:
        os.killpg(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill(process: int) -> None:
    """SIGKILL a process, if it still exists."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def marked(mark: str) -> list[int]:
    """The processes of this host that have ``NAME=value`` in the environment that they were started with.

    Launchers hand their environment on, so this finds what has left its process group, too. Zombies don't
    count.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                has_it = mark.encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if has_it and _state(int(entry.name)) not in ("", "Z", "X"):
                found.append(int(entry.name))
    return found


def kill_marked(mark: str) -> None:
    """SIGKILL all that `marked` finds; return when all of it is gone.

    A process that Python's multiprocessing has set up to remove from shared memory what others leave there
    does that when they are gone, and ends; it is killed only if it has not after some seconds.
    """
    deadline = time.monotonic() + _TIDYING
    while left := marked(mark):
        for process in left:
            if time.monotonic() > deadline or not _tidies(process):
                kill(process)
        time.sleep(0.01)


def _tidies(process: int) -> bool:
    return any("multiprocessing.resource_tracker" in word for word in command(process))


def parent(process: int) -> int:
    """The process that has started a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command(process: int) -> list[str]:
    """Program and arguments of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    return _state(process) in ("T", "t")


def exit_code(returncode: int) -> int:
    """What a shell makes of a return code of `subprocess`: 128 and the signal's number."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """A return code in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
