"""The user's script in a folder of its own: started under ``hvdrecover run``, followed, and ended."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.config import PREEMPTED
from hvdrecover.discovery.history import HistoryFile
from hvdrecover.drill import instruments
from hvdrecover.drill.faults.fault import Fault, Switchable
from hvdrecover.drill.lab.hosts import INTERFACE
from hvdrecover.drill.lab.lab import Lab
from hvdrecover.drill.testimony import Line, Testimony, Witnesses
from hvdrecover.errors import DrillError
from hvdrecover.launch import processes
from hvdrecover.launch.job import Job

_COOLDOWN = ("1", "3")  # seconds for which Horovod leaves a lost host of a lab alone; it is soon back
_LOOK = 0.05  # seconds between looks at what witnesses have written; more, if a look computes for long:
_SHARE = 10.0  # so many times that, so as not to take the job's processor
_NAMING_HOSTS = {"-H", "--hosts", "-hostfile", "--hostfile", "--host-discovery-script", "--discover"}
_REACHING_HOSTS = {
    *("--network-interface", "--network-interfaces", "-p", "--ssh-port", "-i", "--identity"),
    *("--ssh-identity-file", "--max-np", "--max-num-proc", "--mpi"),
}
_ANSWERS = 3.0  # seconds for guardians to say where their ranks are
_LEAVE = 120.0  # seconds for a run that is asked to leave


@dataclass(frozen=True)
class Command:
    """The way in which the script is started.

    Attributes:
        script: the training command.
        processes: number of ranks.
        options: more options of ``hvdrecover run``.
        resizes: whether a fault may change the number of ranks.
    """

    script: tuple[str, ...]
    processes: int
    options: tuple[str, ...] = ()
    resizes: bool = False


class Run:
    """One run of the script, through any number of starts.

    Args:
        folder: all that belongs to it goes there: checkpoint root, events, what witnesses write, log, and
            temporary files.
        command: how it is started.
        data: a copy of training data that may be changed, if there is one.
        lab: the hosts that it is to run on, one rank on each; by default all are on this host.

    Attributes:
        root: the folder of its checkpoint root.
        size: how many ranks it is started with.
        hosts: its hosts that a drill can switch: all of the lab but the first, where the supervisor is.
        slots: the lines ``host:slots`` that name all of its hosts.
        names_hosts: whether the user has said where it runs, or how that is found out.
        resizes: whether its number of ranks may change.
        codes: the exit codes of its starts that have ended.
        leaving: how many seconds it took to leave, each time it was started again.
        ended: when its last start had ended, in seconds since the Unix epoch.
    """

    def __init__(
        self, folder: Path, command: Command, data: Path | None = None, lab: Lab | None = None
    ) -> None:
        self.folder = folder
        self.root = folder / "checkpoint"
        self.data = data
        self.size = command.processes
        self.hosts: Sequence[Switchable] = lab.hosts[1:] if lab else ()
        self.slots: Sequence[str] = (
            [f"{host.address}:1" for host in lab.hosts] if lab else [f"localhost:{self.size}"]
        )
        self.names_hosts = bool(_of(command.options, _NAMING_HOSTS))
        self.resizes = command.resizes
        self.codes: list[int] = []
        self.leaving: list[float] = []
        self.ended = math.inf
        self._command = command
        self._lab = lab
        self._options: list[str] = []
        self._repaired = 0.0
        self._environ = {
            "HVDRECOVER_EVENTS": os.fspath(folder / "events"),
            "HVDRECOVER_CHECKPOINT": os.fspath(self.root),
            "HVDRECOVER_INSTRUMENTS": instruments.__name__,
            "HVDRECOVER_REHEARSAL": "1",
            "HVDRECOVER_DRILL": os.fspath(folder),
            "TMPDIR": os.fspath(folder / "tmp"),
        }
        self._witnesses = Witnesses(folder / "witness")
        self._job: Job | None = None

    # -- starting and ending ---------------------------------------------------------------------------

    def begin_like(self, other: Run) -> None:
        """Have this run begin with the very state that another one was begun with."""
        self._make_folders()
        shutil.copytree(other.folder / "initial", self.root)

    def prepare(self, faults: Iterable[Fault]) -> None:
        """Get ready for faults."""
        for fault in faults:
            self._environ.update(fault.prepare(self))
            self._options += [word for word in fault.options(self) if word not in self._options]

    def start(self) -> None:
        """Start it, or start it again."""
        self._make_folders()
        command = [sys.executable, "-m", "hvdrecover", "run", "-np", str(self.size)]
        command += [*self._place(), *self._command.options, *self._options, "--", *self._command.script]
        if self._lab is not None:
            command = self._lab.hosts[0].command(command)
        self._job = Job(command, self.folder / "log.txt", self._environ)

    def _make_folders(self) -> None:
        for name in ("", "events", "orders", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def _place(self) -> list[str]:
        """The options of a run on the hosts of a lab; a fault may have them discovered in another way."""
        if self._lab is None:
            return []
        listing = self.folder / "hosts.txt"
        listing.write_text("".join(f"{line}\n" for line in self.slots))
        words = ["--network-interface", INTERFACE, "-i", os.fspath(self._lab.key)]
        words += ["--min-np", "1", "--max-np", str(self.size)]
        if "--discover" not in self._options:
            words += [
                "--discover",
                shlex.join(["file", "--cache", os.fspath(self._cache), os.fspath(listing)]),
            ]
        return [*words, "--blacklist-cooldown-range", *_COOLDOWN]

    @property
    def _cache(self) -> Path:
        """Return where host discovery remembers what it has found."""
        return self.folder / "hosts"

    def leave(self) -> None:
        """Ask it to leave after a durable commit, if it still runs, and wait for its end."""
        if self.job.running:
            os.kill(self.job.pid, signal.SIGTERM)
        self.wait(_LEAVE)

    def start_again(self) -> None:
        """Wait until it has left, and start it again, as a scheduler would."""
        began = time.monotonic()
        if self.wait(_LEAVE) == PREEMPTED:
            self.leaving.append(time.monotonic() - began)
        self.start()

    def wait(self, timeout: float) -> int:
        """Wait for the end of this start; its exit code.

        Raises:
            DrillError: it still runs.
        """
        deadline = time.monotonic() + timeout
        while self.job.running:
            if time.monotonic() > deadline:
                raise self.failure(f"it still runs after {timeout:.0f} s")
            time.sleep(_LOOK)
        self.codes.append(self.job.wait(0))
        return self.codes[-1]

    def kill(self) -> None:
        """End all that is left of it."""
        if self._job is not None:
            self._job.kill()
            self.ended = time.time()

    def left(self) -> list[int]:
        """Processes that have outlived it."""
        return self.job.processes()

    @property
    def job(self) -> Job:
        """The present start."""
        assert self._job is not None
        return self._job

    @property
    def running(self) -> bool:
        """Return whether it runs."""
        return self.job.running

    def repaired(self) -> None:
        """Say that a host has just been repaired."""
        self._repaired = time.time()

    def hosts_are_well(self) -> bool:
        """Return whether host discovery has found all hosts healthy since the last one was repaired."""
        memories = [HistoryFile(path).read() for path in self._cache.glob("*.json")]
        found = [memory.health.get(line.rpartition(":")[0]) for memory in memories for line in self.slots]
        return bool(found) and all(
            each is not None and each.healthy and each.checked >= self._repaired for each in found
        )

    def failure(self, what: str) -> DrillError:
        """An error about this run, with the end of its log."""
        return DrillError(os.fspath(self.folder), f"{what}; its log ends with\n{self.job.tail()}")

    # -- following -------------------------------------------------------------------------------------

    def testimony(self) -> Testimony:
        """Return what its witnesses have told so far."""
        return Testimony.of(self._witnesses.look())

    @property
    def newest(self) -> int:
        """The newest commit that any rank stands at, or has made."""
        return max((line.commit for line in self._present()), default=0)

    def wait_until(self, true: Callable[[Testimony], bool], timeout: float) -> bool:
        """Wait until something is true of what witnesses tell; False if the run has ended before.

        Raises:
            DrillError: it took too long.
        """
        deadline = time.monotonic() + timeout
        while True:
            computed, running = time.thread_time(), self.running
            if true(self.testimony()):
                return True
            if not running:
                return False
            if time.monotonic() > deadline:
                self._ask_where_ranks_are()
                raise self.failure(f"no progress for {timeout:.0f} s")
            time.sleep(max(_LOOK, _SHARE * (time.thread_time() - computed)))

    def _ask_where_ranks_are(self) -> None:
        """Have the log say it, and their stacks written beside the run's events."""
        os.kill(self.supervisor(), signal.SIGQUIT)
        time.sleep(_ANSWERS)

    def follow(self, timeout: float) -> None:
        """Wait for one more commit, or the end.

        Raises:
            DrillError: it took too long.
        """
        before = self.newest
        self.wait_until(lambda told: self.newest > before, timeout)

    # -- processes -------------------------------------------------------------------------------------

    def ranks(self) -> list[int]:
        """The ranks that train now, in order."""
        return sorted({line.rank for line in self._present()})

    def process_of(self, rank: int) -> int:
        """Process id of the training process that has a rank now."""
        return next(line.pid for line in reversed(self._present()) if line.rank == rank)

    def guardian_of(self, rank: int) -> int:
        """Process id of its guardian."""
        return processes.parent(self.process_of(rank))

    def supervisor(self) -> int:
        """Process id of the supervisor."""
        return self.job.pid

    def launcher(self) -> int:
        """Process id of Horovod's driver."""
        return next(
            process
            for process in self.job.processes()
            if "hvdrecover.launch.run_horovodrun" in processes.command(process)
        )

    def lasting(self) -> list[int]:
        """Processes that outlive the faults of ranks: the supervisor and the guardians."""
        return [self.supervisor(), *sorted({self.guardian_of(rank) for rank in self.ranks()})]

    def order(self, rank: int, what: str) -> None:
        """Have a training process do something at its next batch; see `hvdrecover.drill.witness`."""
        path = self.folder / "orders" / str(rank)
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").rename(path)

    def _present(self) -> list[Line]:
        """Return the reports of the ranks of the last rendezvous."""
        rendezvouses = self.testimony().rendezvouses
        pids = {line.pid: line.time for line in rendezvouses[-1]} if rendezvouses else {}
        return [line for line in self._witnesses.lines if line.time >= pids.get(line.pid, float("inf"))]


def placing(options: Sequence[str]) -> list[str]:
    """The options among these that a lab decides on itself."""
    return _of(options, _NAMING_HOSTS | _REACHING_HOSTS)


def _of(options: Sequence[str], names: Set[str]) -> list[str]:
    return [name for name in (option.partition("=")[0] for option in options) if name in names]


def has_stepped(told: Testimony, since: float) -> bool:
    """Return whether all ranks of the last rendezvous, which began after a time, have stepped since.

    Args:
        told: what witnesses tell.
        since: the time, in seconds of the monotonic clock.
    """
    if not told.rendezvouses:
        return False
    last = told.rendezvouses[-1]
    return min(line.time for line in last) > since and told.stepped(last) is not None
