"""Processes: start them so that they die with their parent, wait for them, find, kill and describe them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hvdrecover.launch import waits

_PR_SET_PDEATHSIG = 1
_TRACKER = "multiprocessing.resource_tracker"  # in its command
_TIDYING = 5.0  # seconds
_OPEN_FILES = 1 << 16  # enough for any job; not more, as some programs loop over all possible descriptors
_SHORTEST_LOOK, _LONGEST_LOOK = 0.01, 0.5  # seconds between checks of killed processes
_libc = ctypes.CDLL(None, use_errno=True)
_CGROUPS = Path("/sys/fs/cgroup")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent dies."""
    # The kernel means the *thread* that started this process: only main threads may start such processes.
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def allow_open_files(wanted: int = _OPEN_FILES) -> None:
    """Raise the soft limit of open files of this process and its children, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class Child(subprocess.Popen[bytes]):
    """A child process that `poll` does not reap, so no signal can reach another process with its number."""

    def poll(self) -> int | None:
        if self.returncode is not None:
            return self.returncode
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another caller has reaped it
            return super().poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def kill_group(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def ends(self, patience: float = waits.KILLED) -> bool:
        """Wait for the end of the process, and reap it; return False after a timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(patience)
        return self.returncode is not None


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    hand_down: Sequence[int] = (),
    new_session: bool = False,
    **streams: Any,
) -> Child:
    """Start a process that the kernel kills when this one dies, in its own process group."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent()
        if os.getppid() != parent:  # the parent has died in between
            os._exit(1)

    return Child(  # no deadline: until the program runs; the supervisor's SIGKILL ends a guardian
        list(command),
        env=dict(environ),
        pass_fds=tuple(hand_down),
        start_new_session=new_session,
        process_group=None if new_session else 0,
        preexec_fn=prepare,
        **streams,
    )


class Waking:
    """Waits for signals, and for files in its selector, whose ``data`` is the function to call."""

    def __init__(self, signals: Iterable[int]) -> None:
        self.selector = selectors.DefaultSelector()
        self._wanted = set(signals)
        self._noted: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Waking:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self._reader, selectors.EVENT_READ, lambda: os.read(self._reader, 4096))
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in self._wanted}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        self.selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> list[int]:
        """Wait at most this long, call the functions of readable files, and return the received signals."""
        for key, _ in self.selector.select(seconds):
            key.data()
        noted = self._noted.copy()
        del self._noted[: len(noted)]
        return noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the living processes on this host that were started with ``NAME=value`` in their environment."""
    # Launchers hand their environment on, so this also finds processes that left the launcher's group.
    return [process.pid for process in _marked(mark, known=())]


def _marked(mark: str, known: Collection[int]) -> list[Any]:
    import psutil  # installed with Horovod; guardians and standbys do not import it

    name, _, value = mark.partition("=")
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in known and process.environ().get(name) == value and _lives(process):
                found.append(process)
    return found


def _lives(process: Any) -> bool:
    return process.is_running() and _state(process.pid) not in ("", "Z", "X")


def kill_marked(
    mark: str,
    patience: float = waits.ALL_KILLED,
    *,
    pause: Callable[[float], object] = time.sleep,  # may do other work meanwhile
    hurries: Callable[[], bool] = lambda: False,  # then waits at most `waits.KILLED`
) -> list[int]:
    """SIGKILL all processes that `marked` finds; return those that cannot be killed."""
    began, look = time.monotonic(), _SHORTEST_LOOK
    found: dict[Any, bool] = {}  # processes, and whether each is a resource tracker
    while True:
        # The environment is read once: it is gone before the process, and reading it may block on a bad disk.
        found = {process: tracks for process, tracks in found.items() if _lives(process)}
        fresh = _marked(mark, {process.pid for process in found})
        found |= {process: _TRACKER in " ".join(command(process.pid)) for process in fresh}
        waited = time.monotonic() - began
        for process, tracks in found.items():
            # A resource tracker removes shared memory that others leave behind, and then ends: kill it late.
            if waited > _TIDYING or not tracks:
                # The process may have ended. psutil does not kill a new process with the same number.
                with contextlib.suppress(Exception):
                    process.kill()
        if not found or waited > (min(waits.KILLED, patience) if hurries() else patience):
            return sorted(process.pid for process in found)
        look = _SHORTEST_LOOK if fresh else min(_LONGEST_LOOK, 1.2 * look)
        pause(look)


def command(process: int) -> list[str]:
    """Return the program and arguments of a process; empty if it is gone."""
    return _read(Path(f"/proc/{process}/cmdline")).split("\0")[:-1]


def named(processes: Sequence[int]) -> str:
    # The command line of an unkillable process is not used, as reading it may block.
    names = ((each, _read(Path(f"/proc/{each}/comm")).strip() or "gone") for each in processes)
    return ", ".join(f"process {process} ({name})" for process, name in names)


def is_stopped(process: int) -> bool:
    return _state(process) in ("T", "t")


def _state(process: int) -> str:
    """Return a process's state, such as Z for a zombie; '' if it is gone."""
    return _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].strip()[:1]


def exit_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def returncode_of(code: int) -> int:
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code


def describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def memory_kills() -> int:
    """Return how many processes were killed for lack of memory, in this cgroup or on this host, so far."""
    groups = _read(Path("/proc/self/cgroup")).strip().splitlines()[-1:]  # the last line is of version 2
    own = [_CGROUPS / each.rpartition(":")[2].lstrip("/") / "memory.events" for each in groups]
    counts = (_read(path).split() for path in (*own, Path("/proc/vmstat")))
    return max(int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0 for words in counts)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
