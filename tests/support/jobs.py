"""The harness of acceptance tests: start jobs, kill their processes, read their files."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hvdrecover.drill.run import ROOT_MAY_USE_MPI as ROOT_MAY_USE_MPI
from hvdrecover.drill.run import Job as Job
from hvdrecover.drill.run import Run
from hvdrecover.drill.run import supervised as supervised
from hvdrecover.drill.run import wait_until as wait_until
from hvdrecover.events import Follower
from hvdrecover.launch.processes import command as command
from hvdrecover.launch.processes import kill as kill
from hvdrecover.launch.processes import kill_marked as kill_marked
from hvdrecover.launch.processes import marked as marked

PATIENCE = 400.0  # seconds to wait for anything, on a busy machine
TRAINING_SAMPLES = 1437

# Exit codes of `hvdrecover run`, as docs/commands.md lists them.
PREEMPTED = 75
FENCED = 77

SHARED_MEMORY = Path("/dev/shm")

# The first words of processes of a job; see `running`.
GUARDIAN = ("hvdrecover", "worker")
STANDBY = ("hvdrecover.launch.training", "standby")
SUPERVISOR = ("hvdrecover", "run")
DRIVER = ("hvdrecover.launch.horovodrun",)  # of Horovod

_COMMIT = re.compile(r"g(\d+)-c(\d+)")


class Commit(NamedTuple):
    """A commit in a checkpoint root; a later one compares as greater."""

    generation: int
    number: int

    @property
    def name(self) -> str:
        return f"g{self.generation:04}-c{self.number:08}"


def run_job(
    command: Sequence[str],
    log: Path,
    environ: Mapping[str, str] | None = None,
    *,
    code: int | None = 0,
    patience: float = PATIENCE,
) -> str:
    """Run a job to its end; return its log. It must have an exit code; None stands for any failure."""
    job = Job(command, log, environ)
    try:
        found = job.wait(patience)
        assert found == code or (code is None and found != 0), job.tail(80)
    finally:
        job.kill()
    return log.read_text(errors="replace")


def static(workers: int) -> list[str]:
    return [_program("horovodrun"), "--gloo", "-np", str(workers)]


def mpi(workers: int) -> list[str]:
    return [_program("horovodrun"), "--mpi", "-np", str(workers), "--mpi-args=--oversubscribe"]


def mpirun(workers: int) -> list[str]:
    return [_program("mpirun"), "--oversubscribe", "-np", str(workers)]


def elastic(hosts: Path, workers: int = 2) -> list[str]:
    """Return the command of elastic ``horovodrun`` with the hosts of a file, which may change meanwhile."""
    discovery = shlex.join([sys.executable, "-m", "hvdrecover", "discover", "file", os.fspath(hosts)])
    words = [_program("horovodrun"), "-np", str(workers), "--min-np", "1"]
    return [*words, "--host-discovery-script", discovery, "--network-interface", "lo"]


def _program(name: str) -> str:
    return os.fspath(Path(sys.executable).with_name(name))


def parent(process: int) -> int:
    return psutil.Process(process).ppid() if psutil.pid_exists(process) else 0


def running(job: Job, *module: str) -> list[int]:
    """Return the ids of the job's processes that run a Python module, named with its first arguments."""
    words = ["-m", *module]
    commands = {process: command(process) for process in job.processes()}
    return [process for process, found in commands.items() if found[1 : 1 + len(words)] == words]


def commits(root: Path) -> list[Commit]:
    names = (path.parent.name for path in root.glob("g*/MANIFEST.json"))
    return sorted(
        Commit(int(found[1]), int(found[2])) for name in names if (found := _COMMIT.fullmatch(name))
    )


def durable(root: Path) -> int:
    """Return the number of the newest complete commit of a root; 0 if there is none."""
    return max((commit.number for commit in commits(root)), default=0)


def near_folder(base: Path = SHARED_MEMORY) -> Path:
    """Return the folder that holds all near roots of this user."""
    return base / f"hvdrecover-{os.getuid()}"


def near_root(root: Path, folder: Path) -> Path | None:
    """Return the near root of a checkpoint root, if there is one in the folder of a user's near roots."""
    ours = json.dumps({"url": f"file://{root}"})
    for owner in folder.glob("*/root.json"):
        with suppress(FileNotFoundError):  # those of other jobs come and go, and may be half-written
            if owner.read_text() == ours:
                return owner.parent
    return None


def wait_until_in_memory(job: Job, root: Path, commit: int) -> None:
    """Wait until a commit of this number, or a later one, of a root is sealed in the host's memory."""

    def is_sealed() -> bool:
        near = near_root(root, near_folder())
        return near is not None and durable(near) >= commit

    wait_until(job, is_sealed, "sealed commit")


def failing_hosts(events: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in (events / "failing-hosts").read_text().splitlines():
        host = json.loads(line)["host"]
        counts[host] = counts.get(host, 0) + 1
    return counts


# -- the digits example --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One rank's part of one training step: a line of `hvdrecover.examples.digits.Ledger`."""

    time: float  # when it was done, in seconds since the epoch
    pid: int
    rank: int  # or the virtual rank
    size: int  # number of ranks, or of virtual ranks
    generation: int  # of the last commit before it
    commit: int  # number of that commit
    epoch: int
    indices: tuple[int, ...]  # of the samples


class DigitsRun(Run):
    """One run of the digits example in its own folder, through any number of starts.

    Its ledger says which samples were trained on after which commit, and `committed` which batches are part
    of the final state. A batch that was trained on after commit ``k`` of generation ``g`` is lost if a later
    generation resumed from commit ``k`` or an earlier one. `program` is what Python runs instead of the
    example: a script with its own arguments, or ``-m MODULE``.
    """

    def __init__(
        self, folder: Path, epochs: int, *options: str, framework: str = "torch", program: Sequence[str] = ()
    ) -> None:
        super().__init__(folder)
        self.epochs = epochs
        self.options = options
        self.framework = framework
        self._program = list(program) or ["-m", f"hvdrecover.examples.{framework}_digits"]

    @property
    def weights(self) -> Path:
        """The file of final weights, optimizer state and accuracy."""
        return self.folder / ("final.pt" if self.framework == "torch" else "final.npz")

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def start(self, launcher: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Job:
        command = [*launcher, sys.executable, *self._program]
        command += ["--epochs", str(self.epochs), "--checkpoint", str(self.root), "--save", str(self.weights)]
        command += ["--ledger", str(self.folder / "ledger"), *self.options]
        return self.launch(command, environ)

    def finish(self, job: Job) -> None:
        try:
            assert job.wait(PATIENCE) == 0, job.tail()
        finally:
            job.kill()

    def wait_for(self, job: Job, reached: Callable[[Batch], bool], after: float = 0.0) -> Batch:
        """Wait for the first batch after a time for which a function returns true."""

        def look() -> Batch | None:
            return next((each for each in self.batches() if each.time > after and reached(each)), None)

        found = wait_until(job, look, patience=PATIENCE)
        assert found is not None
        return found

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return read_events(self.folder / "events", *kinds)

    def generations(self) -> dict[int, int]:
        """Return, for each generation, the commit that it resumed from."""
        return {int(event["generation"]): int(event["commit"]) for event in self.events("sync")}

    def batches(self) -> list[Batch]:
        # Incomplete lines of killed processes are skipped.
        paths = (self.folder / "ledger").glob("*.jsonl")
        found = (_batch(line) for path in paths for line in path.read_text().splitlines())
        return sorted(filter(None, found), key=lambda batch: batch.time)

    def committed(self) -> list[Batch]:
        return committed(self.batches(), self.generations())

    def samples(self, epoch: int) -> Counter[int]:
        """Return how often each sample of an epoch is in the final state."""
        return Counter(index for batch in self.committed() if batch.epoch == epoch for index in batch.indices)

    def process_of(self, rank: int) -> int:
        return next(batch.pid for batch in reversed(self.batches()) if batch.rank == rank)


@functools.lru_cache(1 << 16)  # tests that follow a run read the same lines again and again
def _batch(line: str) -> Batch | None:
    try:
        *fields, indices = json.loads(line)
    except ValueError:
        return None
    return Batch(*[*fields, tuple(indices)])


def committed(batches: Sequence[Batch], starts: dict[int, int]) -> list[Batch]:
    """Return the batches of the final state; `starts` has the commit that each generation resumed from."""
    return [
        batch
        for batch in batches
        if all(start > batch.commit for generation, start in starts.items() if generation > batch.generation)
    ]


def read_events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the facts of the events of a run of some kinds, or all of them, in order of time."""
    events = sorted(Follower(folder).look(), key=lambda event: event.time)
    return [dict(event.facts) for event in events if not kinds or event.kind in kinds]
