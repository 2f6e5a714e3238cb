"""The machine that a process runs on: its clock, its versions and addresses, its memory, its processes."""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hvdrecover.version import __version__

P = ParamSpec("P")
T = TypeVar("T")

_LOOPBACK = ("127.0.0.1", "127.0.1.1")  # addresses of this host's name; Debian uses the second
_RESOLVING = 5.0  # seconds for the name of a host to be resolved
_FILES = ("inactive_file", "active_file")  # both can be dropped, and both are part of ``MemAvailable``
_ENDED = {"Z", "X"}  # see proc_pid_stat(5)


# -- time, and calls with a time limit ----------------------------------------------------------------


class Clock:
    """The machine's clock, in seconds. It is passed as an argument, so that tests need not sleep."""

    def now(self) -> float:
        """Return the wall-clock time since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return a time that never goes back, from an arbitrary start."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait until ``event`` is set or ``timeout`` has passed; return whether it is set."""
        return event.wait(timeout)


SYSTEM_CLOCK = Clock()


class Bounded:
    """Makes calls in daemon threads, and waits for each call for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: Future[Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Make a call; raise `TimeoutError` if it, or one before it, is late."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function(*args, **options))
            except Exception as error:
                result.set_exception(error)

        with self._lock:
            # A late call continues in its thread. Until it ends, further calls fail at once. So a device that
            # hangs costs one time-out and one thread.
            if self._last is not None and not self._last.done():
                raise TimeoutError("an earlier call has still not returned")
            try:
                threading.Thread(target=call, daemon=True).start()
            except RuntimeError as error:  # this process has as many as it may have
                raise TimeoutError("no thread can be started") from error
            self._last = result
            if not wait([result], self._seconds).done:
                raise TimeoutError(f"no answer in {self._seconds:g} s")
            return result.result()


# -- versions and addresses ----------------------------------------------------------------------------


def version_of(distribution: str) -> str | None:
    found = Distribution.discover(name=distribution)
    return next((each.version for each in found if "Version" in each.metadata), None)


def versions() -> dict[str, str | None]:
    """Return package to its version, or None if it is not installed; Python and hvdrecover as well."""
    found: dict[str, str | None] = {"python": platform.python_version(), "hvdrecover": __version__}
    for package in ("torch", "tensorflow", "keras", "horovod", "mpi4py"):
        found[package] = version_of(package)
    found["tensorflow"] = found["tensorflow"] or version_of("tensorflow-cpu")
    return found


def address_of(host: str) -> str:
    """Return a host's IPv4 address; empty if its name is unknown, or not resolved in time."""
    try:
        return Bounded(_RESOLVING)(socket.gethostbyname, host)
    except OSError:
        return ""


def source_towards(host: str) -> str:
    """Return the IPv4 address from which this host sends to another one; empty if that cannot be reached."""
    address = address_of(host)
    if not address:
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_local(host: str) -> bool:
    if host in ("localhost", socket.gethostname()):
        return True
    address = address_of(host)
    if not address:
        return False
    return address in _LOOPBACK if address.startswith("127.") else address == source_towards(address)


def describe() -> str:
    """Return the system of this machine and how many processors this process may use, in a few words."""
    return f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} processors"


# -- memory --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Available:
    nbytes: int
    limited: bool  # whether a cgroup limits it, and not the host


def available_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), *, swap: bool = False
) -> Available:
    """Return the host's available memory, or the room in this process's cgroups if that is less."""
    words = (proc / "meminfo").read_text().split()
    fields = ("MemAvailable:", "SwapFree:")[: 1 + swap]
    host = sum(int(words[words.index(field) + 1]) * 1024 for field in fields)
    rooms = [room for folder in _cgroups(proc, cgroups) if (room := _room(folder)) is not None]
    least = min([host, *rooms])
    return Available(least, least < host)


def memory_left() -> Available | None:
    """Return `available_memory` with swap; None if the system does not tell."""
    try:
        return available_memory(swap=True)
    except (OSError, ValueError):
        return None


def _room(folder: Path) -> int | None:
    """Return the memory that is left below the limit of a cgroup; None if it has no limit."""
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        try:
            text = (folder / limit).read_text().strip()
            if not text.isdigit():  # "max"
                return None
            words = (folder / "memory.stat").read_text().split()
            names = [name for each in _FILES if (name := prefix + each) in words]
            cached = sum(int(words[words.index(name) + 1]) for name in names)
            return max(0, int(text) - int((folder / used).read_text()) + cached)
        except OSError:
            continue
    return None


def _cgroups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the cgroups that limit this process's memory, version 1 or 2, from its own to the topmost."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # version 2 has one hierarchy for all
            own = (cgroups / "memory" if controllers else cgroups) / path.lstrip("/")
            found += [own, *(above for above in own.parents if above.is_relative_to(cgroups))]
    return found


# -- processes -----------------------------------------------------------------------------------------


def identity(pid: int | None = None) -> str:
    """Return an identity that no other process has, on any host, at any time; '' if ended or unknown."""
    number = os.getpid() if pid is None else pid
    try:
        state, start = _seen(number)
        return "" if state in _ENDED else f"{_place()} {number} {start}"
    except (OSError, IndexError):
        return ""


def has_ended(process: str) -> bool:
    """Return whether a process, named by its `identity`, is known to have ended; False for other hosts'."""
    place, _, rest = process.rpartition("] ")
    number, _, start = rest.partition(" ")
    try:
        if f"{place}]" != _place() or not number.isdecimal():
            return False
    except OSError:
        return False
    try:
        state, present = _seen(int(number))
        return state in _ENDED or present != start  # another process may have its number by now
    except (OSError, IndexError):  # other users' processes may be hidden, see hidepid in proc(5)
        return not _exists(int(number))


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
