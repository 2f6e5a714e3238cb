"""The user's script in its own folder: started by ``hvdrecover run`` with a witness in each process."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover import config
from hvdrecover.checkpoint.near import place
from hvdrecover.discovery.history import HistoryFile
from hvdrecover.drill.jobs import Run, wait_until
from hvdrecover.drill.lab import INTERFACE, Host, Lab
from hvdrecover.drill.records import Line, Reader, Records
from hvdrecover.errors import DrillError, HvdrecoverError
from hvdrecover.launch import processes
from hvdrecover.launch.job import Job

_COOLDOWN = ("1", "3")  # seconds for which Horovod avoids a lost host of a lab; it is soon back
_NAMING_HOSTS = {"-H", "--hosts", "-hostfile", "--hostfile", "--host-discovery-script", "--discover"}
_REACHING_HOSTS = {
    *("--network-interface", "--network-interfaces", "-p", "--ssh-port", "-i", "--identity"),
    *("--ssh-identity-file", "--max-np", "--max-num-proc", "--mpi"),
}
_ANSWERS = 3.0  # seconds for the guardians to log where their ranks are
_LEAVE = 120.0  # seconds for a run to leave, and for its processes to end after the supervisor was killed


@dataclass(frozen=True)
class Command:
    """How the script is started.

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

    @property
    def names_hosts(self) -> bool:
        """Return whether the options say where the script runs."""
        return bool(_among(self.options, _NAMING_HOSTS))


class ScriptRun(Run):
    """One run of the user's script, through any number of starts.

    Args:
        folder: takes everything that belongs to the run.
        command: how it is started.
        lab: the hosts to run on, one rank on each; by default all ranks run on this host.

    Attributes:
        size: number of ranks at the start.
        hosts: the hosts that a fault may strike: all of the lab but the first, which has the supervisor.
        codes: the exit codes of the starts that have ended.
    """

    def __init__(self, folder: Path, command: Command, lab: Lab | None = None) -> None:
        super().__init__(folder)
        self.size = command.processes
        self.hosts: Sequence[Host] = lab.hosts[1:] if lab else ()
        self.codes: list[int] = []
        self._command = command
        self._lab = lab
        self._options: list[str] = []
        self._repaired = 0.0
        self._reader = Reader(folder / "witness")
        self._job: Job | None = None
        for name in ("events", "orders", "tmp"):
            (folder / name).mkdir(exist_ok=True)

    # -- starting and ending ---------------------------------------------------------------------------

    def begin_like(self, other: ScriptRun) -> None:
        """Have this run begin with the same initial state as another run."""
        shutil.copytree(other.folder / "initial", self.root)

    def add_options(self, words: Sequence[str]) -> None:
        """Start the run with more options of ``hvdrecover run``."""
        self._options += [word for word in words if word not in self._options]

    def start(self) -> None:
        """Start the run, or start it again."""
        command = [sys.executable, "-m", "hvdrecover", "run", "-np", str(self.size)]
        command += [*self._place(), *self._command.options, *self._options, "--", *self._command.script]
        if self._lab is not None:
            command = self._lab.hosts[0].command(command)
        environ = {
            "HVDRECOVER_CHECKPOINT": os.fspath(self.root),
            "HVDRECOVER_INSTRUMENTS": "hvdrecover.drill.witness",
            "HVDRECOVER_REHEARSAL": "1",
            "HVDRECOVER_DRILL": os.fspath(self.folder),
            "TMPDIR": os.fspath(self.folder / "tmp"),
        }
        self._job = self.launch(command, environ)

    def _place(self) -> list[str]:
        """Return the options that place the run on the hosts of a lab."""
        if self._lab is None:
            return []
        listing = self.folder / "hosts.txt"
        listing.write_text("".join(f"{host.address}:1\n" for host in self._lab.hosts))
        discover = shlex.join(["file", "--cache", os.fspath(self._cache), os.fspath(listing)])
        words = ["--network-interface", INTERFACE, "-i", os.fspath(self._lab.key), "--discover", discover]
        words += ["--min-np", "1", "--max-np", str(self.size)]
        return [*words, "--blacklist-cooldown-range", *_COOLDOWN]

    @property
    def _cache(self) -> Path:
        """The folder in which host discovery keeps its findings."""
        return self.folder / "hosts"

    def leave(self) -> None:
        """Ask the run to leave after a durable commit, if it still runs, and wait for its end."""
        if self.job.running:
            os.kill(self.job.pid, signal.SIGTERM)
        self.wait(_LEAVE)

    def start_again(self) -> int:
        """Wait until the run has ended, start it again as a scheduler would, and return its exit code.

        Raises:
            DrillError: it does not end, or a process of it stays.
        """
        code = self.wait(_LEAVE)
        deadline = time.monotonic() + _LEAVE
        while left := self.job.processes():
            if time.monotonic() > deadline:
                raise self.failure(f"{processes.named(left)} outlived the supervisor")
            time.sleep(0.05)
        self.start()
        return code

    def wait(self, timeout: float) -> int:
        """Wait for the end of this start, and return its exit code.

        Raises:
            DrillError: it still runs.
        """
        try:
            self.codes.append(self.job.wait(timeout))
        except HvdrecoverError:
            raise self.failure(f"it still runs after {timeout:.0f} s") from None
        return self.codes[-1]

    def kill(self) -> None:
        """End everything that is left of the run, and free its memory in the near tier."""
        if self._job is not None:
            self._job.kill()
        for path in self.near_roots():
            with suppress(OSError):
                place.remove(path)

    @property
    def job(self) -> Job:
        """The present start."""
        assert self._job is not None
        return self._job

    @property
    def running(self) -> bool:
        """Return whether the supervisor runs."""
        return self.job.running

    def failure(self, what: str) -> DrillError:
        """Return an error about this run, with the end of its log."""
        return DrillError(os.fspath(self.folder), f"{what}; its log ends with\n{self.job.tail()}")

    def near_roots(self) -> list[Path]:
        """Return the folders of this run's near tier on this host."""
        near = config.read().near
        found = place.roots(near) if near != "off" else ()
        return [each.path for each in found if each.url.endswith(f"://{self.root}")]

    def repaired(self) -> None:
        """Note that a host has just been repaired."""
        self._repaired = time.time()

    def hosts_are_well(self) -> bool:
        """Return whether host discovery has found all hosts healthy since the last repair."""
        memories = [HistoryFile(path).read() for path in self._cache.glob("*.json")]
        addresses = [host.address for host in self._lab.hosts] if self._lab else []
        found = [memory.health.get(address) for memory in memories for address in addresses]
        return bool(found) and all(
            each is not None and each.healthy and each.checked >= self._repaired for each in found
        )

    # -- following -------------------------------------------------------------------------------------

    def records(self) -> Records:
        """Return the lines of the witnesses so far."""
        return self._reader.look()

    @property
    def newest(self) -> int:
        """The newest commit of the present ranks."""
        return max((line.commit for line in self._present()), default=0)

    def wait_until(self, true: Callable[[Records], bool], patience: float) -> bool:
        """Wait until something is true of the records; False if the run ended before.

        Raises:
            DrillError: it took too long.
        """

        def look() -> str:
            ended = not self.running  # before the look: the last lines count
            return "true" if true(self.records()) else "ended" if ended else ""

        try:
            return wait_until(self.job, look, patience=patience) == "true"
        except HvdrecoverError:
            os.kill(self.job.pid, signal.SIGQUIT)  # the guardians log where their ranks are
            time.sleep(_ANSWERS)
            raise self.failure(f"no progress for {patience:.0f} s") from None

    def follow(self, patience: float) -> None:
        """Wait for one more commit, or the end.

        Raises:
            DrillError: it took too long.
        """
        before = self.newest
        self.wait_until(lambda _: self.newest > before, patience)

    # -- processes -------------------------------------------------------------------------------------

    def ranks(self) -> list[int]:
        """Return the ranks that train now, in order."""
        return sorted({line.rank for line in self._present()})

    def process_of(self, rank: int) -> int:
        """Return the id of the training process that has a rank now."""
        return next(line.pid for line in reversed(self._present()) if line.rank == rank)

    def training_processes(self) -> list[int]:
        """Return the ids of all training processes, by rank."""
        return [self.process_of(rank) for rank in self.ranks()]

    def order(self, rank: int, action: str) -> None:
        """Have a training process do something at its next step; see `hvdrecover.drill.witness`."""
        path = self.folder / "orders" / str(rank)
        path.with_suffix(".new").write_text(action)
        path.with_suffix(".new").rename(path)

    def _present(self) -> list[Line]:
        """Return the lines of the ranks of the last rendezvous since it began."""
        rendezvouses = self.records().rendezvouses
        since = {line.pid: line.time for line in rendezvouses[-1]} if rendezvouses else {}
        return [line for line in self._reader.lines if line.time >= since.get(line.pid, float("inf"))]


def placing(options: Sequence[str]) -> list[str]:
    """Return the options that conflict with a lab, which itself decides where the script runs."""
    return _among(options, _NAMING_HOSTS | _REACHING_HOSTS)


def _among(options: Sequence[str], names: Set[str]) -> list[str]:
    return [name for name in (option.partition("=")[0] for option in options) if name in names]
