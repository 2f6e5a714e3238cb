"""Telling whether a process has ended, from another one that may be on another host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_ENDED = {"Z", "X"}  # see proc_pid_stat(5)


def identity(pid: int | None = None) -> str:
    """The identity of a process of this host that no other one has, on any host, at any time.

    Args:
        pid: its number; None for this process.

    Returns:
        The host, its boot, the process's namespace, number and start. Empty if there is no such process, or
        not any more, or this system doesn't tell.
    """
    number = os.getpid() if pid is None else pid
    try:
        state, start = _seen(number)
        return "" if state in _ENDED else f"{_place()} {number} {start}"
    except (OSError, IndexError):
        return ""


def has_ended(process: str) -> bool:
    """Return whether a process is known to have ended; of other hosts and containers, nothing is known.

    Args:
        process: its `identity`, as it said itself.
    """
    place, _, rest = process.rpartition("] ")
    number, _, _ = rest.partition(" ")
    try:
        is_of_here = f"{place}]" == _place()
    except OSError:
        return False
    return is_of_here and number.isdecimal() and _is_gone(int(number), rest.rpartition(" ")[2])


def _is_gone(number: int, start: str) -> bool:
    """Return whether a process of this host has ended; another one may have its number by now."""
    try:
        state, present = _seen(number)
        return state in _ENDED or present != start
    except (OSError, IndexError):
        return not _exists(number)  # other users' processes may be hidden, see hidepid in proc(5)


def _seen(number: int) -> tuple[str, str]:
    """Return the state of a process, and when it was started."""
    state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()
    return state, fields[18]


def _exists(number: int) -> bool:
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
