"""One run of a training script: started in its own folder, followed by its witnesses' lines, and ended."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hvdrecover import config
from hvdrecover.checkpoint import CommitId, near_tier
from hvdrecover.drill.lab import INTERFACE, Host, Lab
from hvdrecover.drill.witness import Reader, Records
from hvdrecover.errors import DrillError
from hvdrecover.launch import processes, waits

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds without any progress until a run counts as stuck
ROOT_MAY_USE_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_COOLDOWN = ("1", "3")  # seconds for which Horovod avoids a lost host of a lab; it is soon back
_LOOK = 0.05  # seconds between looks
_SHARE = 10.0  # wait this many times as long as a look took to compute: the job needs the processor
_ANSWERS = 3.0  # seconds for the guardians to log where their ranks are
_LEAVE = 120.0  # seconds for a run to leave, and for its processes to end after the supervisor was killed

T = TypeVar("T")


class Job:
    """A launcher such as ``horovodrun`` and all processes that it starts on this host."""

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
        self.log = log
        # Launchers hand it to workers: it identifies processes even outside the launcher's process group.
        name, value = "HVDRECOVER_JOB", uuid.uuid4().hex
        self._mark = f"{name}={value}"
        with log.open("ab") as output:
            self._launcher = subprocess.Popen(
                list(command),
                env={**os.environ, **(environ or {}), name: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._launcher.poll() is None

    @property
    def pid(self) -> int:
        return self._launcher.pid

    def processes(self) -> list[int]:
        """Return the ids of the job's living processes on this host, launcher included."""
        return processes.marked(self._mark)

    def wait(self, timeout: float) -> int:
        try:
            return self._launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self.failure(f"it still runs after {timeout:.0f} s") from None

    def kill(self, patience: float = waits.ALL_KILLED) -> list[int]:
        """SIGKILL the launcher and all its processes; return and log those that cannot be killed."""
        if self._launcher.poll() is None:
            self._launcher.kill()
        left = processes.kill_marked(self._mark, patience)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(min(patience, waits.KILLED))
        if left:
            logger.error("%s can't be killed, as a disk hangs perhaps: left", processes.named(left))
        return left

    def failure(self, what: str) -> DrillError:
        return DrillError(f"the job in {self.log.parent}", f"{what}; its log ends with\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def supervised(*options: str, workers: int = 2) -> list[str]:
    """Return the command of ``hvdrecover run`` with options; the words of the script come next."""
    return [sys.executable, "-m", "hvdrecover", "run", "-np", str(workers), *options, "--"]


def wait_until(job: Job, reached: Callable[[], T], what: str = "progress", patience: float = PATIENCE) -> T:
    deadline = time.monotonic() + patience
    while True:
        # Before the look: a job may record something and end between the look and this question.
        running, computed = job.running, time.thread_time()
        if found := reached():
            return found
        if not running or time.monotonic() > deadline:
            why = f"after {patience:.0f} s" if running else "and the job has ended"
            raise job.failure(f"no {what} {why}")
        time.sleep(max(_LOOK, _SHARE * (time.thread_time() - computed)))


class Run:
    """One run of a training script in its own folder, through any number of starts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.root = folder / "checkpoint"

    def launch(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Job:
        settings = {"HVDRECOVER_EVENTS": os.fspath(self.folder / "events"), **ROOT_MAY_USE_MPI}
        # As in an activated environment: horovodrun looks for mpirun on the path.
        programs = os.fspath(Path(sys.executable).parent)
        settings["PATH"] = os.pathsep.join([programs, config.environment()["PATH"]])
        return Job(command, self.folder / "log.txt", {**settings, **(environ or {})})


@dataclass(frozen=True)
class Command:
    script: tuple[str, ...]
    processes: int  # number of ranks
    options: tuple[str, ...] = ()  # more options of `hvdrecover run`
    resizes: bool = False  # whether a fault may change the number of ranks


class ScriptRun(Run):
    """One run of the user's script with a witness in each process; in a lab, each host has one rank."""

    def __init__(self, folder: Path, command: Command, lab: Lab | None = None) -> None:
        super().__init__(folder)
        self.size = command.processes  # number of ranks at the start
        # Those that a fault may strike: all of the lab but the first, which has the supervisor.
        self.hosts: Sequence[Host] = lab.hosts[1:] if lab else ()
        self.listing = folder / "hosts.txt"  # the hosts that the run discovers, with a slot each
        # Names of this host; Horovod takes each for another host.
        self.names = [f"127.{'0' * number}1" for number in range(self.size)]
        self.codes: list[int] = []  # exit codes of the starts that have ended
        self.damaged: set[CommitId] = set()  # commits that a fault has damaged
        self._command = command
        self._lab = lab
        self._reader = Reader(folder / "witness")
        self._job: Job | None = None
        for name in ("events", "orders", "tmp"):
            (folder / name).mkdir(exist_ok=True)

    # -- starting and ending ---------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    def start(self) -> None:
        options = [*self._command.options, *self._place()]
        command = [*supervised(*options, workers=self.size), *self._command.script]
        if self._lab is not None:
            command = self._lab.hosts[0].command(command)
        environ = {
            "HVDRECOVER_CHECKPOINT": os.fspath(self.root),
            "HVDRECOVER_INSTRUMENTS": "hvdrecover.drill.witness",
            "HVDRECOVER_DRILL": os.fspath(self.folder),
            "TMPDIR": os.fspath(self.folder / "tmp"),
        }
        self._job = self.launch(command, environ)

    def _place(self) -> list[str]:
        """Return the options with which the run follows its list of hosts, if its hosts may change."""
        if self._lab is None and not self._command.resizes:
            return []
        if not self.listing.exists():  # a fault may have changed it before this start
            self.list_hosts([host.address for host in self._lab.hosts] if self._lab else self.names)
        words = ["file", "--cache", os.fspath(self.folder / "hosts"), os.fspath(self.listing)]
        interface = INTERFACE if self._lab else "lo"
        options = ["--discover", shlex.join(words), "--network-interface", interface]
        options += ["--min-np", "1", "--max-np", str(self.size)]
        if self._lab is not None:
            options += ["-i", os.fspath(self._lab.key), "--blacklist-cooldown-range", *_COOLDOWN]
        return options

    def list_hosts(self, hosts: Sequence[str]) -> None:
        new = self.listing.with_suffix(".new")
        new.write_text("".join(f"{host}:1\n" for host in hosts))
        new.rename(self.listing)

    def leave(self) -> None:
        """Ask the run to leave after a durable commit, if it still runs, and wait for its end."""
        if self.job.running:
            os.kill(self.job.pid, signal.SIGTERM)
        self.wait(_LEAVE)

    def start_again(self) -> int:
        """Wait until the run has ended, start it again as a scheduler would, and return its exit code."""
        code = self.wait(_LEAVE)
        deadline = time.monotonic() + _LEAVE
        while left := self.job.processes():
            if time.monotonic() > deadline:
                raise self.job.failure(f"{processes.named(left)} outlived the supervisor")
            time.sleep(_LOOK)
        self.start()
        return code

    def wait(self, timeout: float) -> int:
        self.codes.append(self.job.wait(timeout))
        return self.codes[-1]

    def kill(self) -> None:
        """End everything that is left of the run, and free its memory in the near tier."""
        if self._job is not None:
            self._job.kill()
        for path in self.near_roots():
            with suppress(OSError):
                near_tier.remove(path)

    def near_roots(self) -> list[Path]:
        near = config.read().near
        found = near_tier.roots(near) if near != "off" else ()
        return [each.path for each in found if each.url.endswith(f"://{self.root}")]

    # -- following -------------------------------------------------------------------------------------

    def records(self) -> Records:
        return self._reader.look()

    @property
    def newest(self) -> int:
        return self.records().reached

    def wait_until(self, true: Callable[[Records], bool]) -> bool:
        """Wait until something is true of the records; False if the run ended before."""

        def look() -> str:
            ended = not self.job.running  # before the look: the last lines count
            return "true" if true(self.records()) else "ended" if ended else ""

        try:
            return wait_until(self.job, look) == "true"
        except DrillError:
            os.kill(self.job.pid, signal.SIGQUIT)  # the guardians log where their ranks are
            time.sleep(_ANSWERS)
            raise self.job.failure(f"no progress for {PATIENCE:.0f} s") from None

    def follow_to(self, commit: int) -> None:
        while self.job.running and (before := self.newest) < commit:
            self.wait_until(lambda records, before=before: records.reached > before)  # type: ignore[misc]

    def ranks(self) -> dict[int, int]:
        """Return the ranks that train now, in order, each with the id of its training process."""
        return dict(sorted({line.rank: line.pid for line in self.records().present}.items()))

    def order(self, whom: int | str, action: str) -> None:
        """Have a rank, or the storage, fail; see `hvdrecover.drill.witness`."""
        path = self.folder / "orders" / str(whom)
        path.with_suffix(".new").write_text(action)
        path.with_suffix(".new").rename(path)
