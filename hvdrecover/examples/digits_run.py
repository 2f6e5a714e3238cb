"""The digits example as a job that can be started, watched, killed and looked at afterwards."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdrecover.errors import HvdrecoverError
from hvdrecover.examples import ledger
from hvdrecover.examples.ledger import Batch
from hvdrecover.launch.job import Job

PATIENCE = 400.0  # seconds to wait for anything, on a machine that has much else to do
TRAINING_SAMPLES = 1437
ROOT_MAY_USE_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

_ACCURACY = re.compile(r"test accuracy ([\d.]+)")


def static(workers: int) -> list[str]:
    """A launcher: ``horovodrun`` with a fixed number of workers on this host."""
    return [_program("horovodrun"), "--gloo", "-np", str(workers)]


def mpi(workers: int) -> list[str]:
    """A launcher: ``horovodrun --mpi``."""
    return [_program("horovodrun"), "--mpi", "-np", str(workers), "--mpi-args=--oversubscribe"]


def mpirun(workers: int) -> list[str]:
    """A launcher: ``mpirun``."""
    return [_program("mpirun"), "--oversubscribe", "-np", str(workers)]


def elastic(hosts: Path, workers: int = 2) -> list[str]:
    """A launcher: elastic ``horovodrun`` with at least one worker.

    Args:
        hosts: file with a line ``host:slots`` for each host; it may be changed while the job runs.
        workers: number of workers to start with.
    """
    discovery = shlex.join([sys.executable, "-m", "hvdrecover", "discover", "file", os.fspath(hosts)])
    command = [_program("horovodrun"), "-np", str(workers), "--min-np", "1"]
    command += ["--host-discovery-script", discovery]
    return [*command, "--network-interface", "lo"]


def supervised(*options: str, workers: int = 2) -> list[str]:
    """A launcher: ``hvdrecover run`` on this host.

    Args:
        options: more of its options.
        workers: number of workers.
    """
    return [sys.executable, "-m", "hvdrecover", "run", "-np", str(workers), *options, "--"]


class DigitsRun:
    """One run of the digits example in a folder of its own, through any number of starts.

    Args:
        folder: where its checkpoint root, ledger, events, log and final weights go.
        epochs: how long to train.
        options: more options of the example.
        framework: whose example it is, ``torch`` or ``tensorflow``.
        program: what Python runs instead of the example: a script with its own arguments, or ``-m MODULE``.
    """

    def __init__(
        self,
        folder: Path,
        epochs: int,
        *options: str,
        framework: str = "torch",
        program: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.epochs = epochs
        self._options = options
        self._framework = framework
        self._program = list(program) or ["-m", f"hvdrecover.examples.{framework}_digits"]

    @property
    def root(self) -> Path:
        """The checkpoint root."""
        return self.folder / "checkpoint"

    @property
    def weights(self) -> Path:
        """The file of final weights, optimizer state and accuracy."""
        return self.folder / ("final.pt" if self._framework == "torch" else "final.npz")

    @property
    def log(self) -> str:
        """Return what its processes printed."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def start(self, launcher: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Job:
        """Start it, or start it again; without a launcher, as one process."""
        command = [*launcher, sys.executable, *self._program]
        command += ["--epochs", str(self.epochs), "--checkpoint", str(self.root), "--save", str(self.weights)]
        command += ["--ledger", str(self.folder / "ledger"), *self._options]
        settings = {"HVDRECOVER_EVENTS": str(self.folder / "events")}
        # As in an activated environment: horovodrun looks for mpirun on the path.
        settings["PATH"] = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
        return Job(command, self.folder / "log.txt", {**settings, **ROOT_MAY_USE_MPI, **(environ or {})})

    def finish(self, job: Job) -> None:
        """Wait for the end of a job, which must be a good one.

        Raises:
            HvdrecoverError: the job failed, or still runs.
        """
        try:
            if code := job.wait(PATIENCE):
                raise HvdrecoverError(f"the job ended with exit code {code}; its log ends with\n{job.tail()}")
        finally:
            job.kill()

    def wait_for(self, job: Job, reached: Callable[[Batch], bool], after: float = 0.0) -> Batch:
        """Wait for the first batch, done after a time, of which something is true.

        Raises:
            HvdrecoverError: the job ended, or did not get there in time.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            running = job.running
            for batch in self.batches():
                if batch.time > after and reached(batch):
                    return batch
            if not running:
                break
            time.sleep(0.05)
        raise HvdrecoverError(f"the job did not get on; its log ends with\n{job.tail()}")

    def batches(self) -> list[Batch]:
        """Return what has been trained so far, in order of time."""
        return ledger.read(self.folder / "ledger")

    def generations(self) -> dict[int, int]:
        """Generation to the commit that it resumed from."""
        return ledger.generations(self.folder / "events")

    def committed(self) -> list[Batch]:
        """Return what is part of the final state."""
        return ledger.committed(self.batches(), self.generations())

    def samples(self, epoch: int) -> Counter[int]:
        """Return how often each sample of an epoch is in the final state."""
        return Counter(index for batch in self.committed() if batch.epoch == epoch for index in batch.indices)

    def process_of(self, rank: int) -> int:
        """The process that was a rank's when the rank last did a batch."""
        return next(batch.pid for batch in reversed(self.batches()) if batch.rank == rank)

    def digest(self) -> str:
        """The digest of the final weights, as the last commit's manifest has it."""
        manifest = json.loads(max(self.root.glob("g*/MANIFEST.json")).read_text())
        return next(str(file["digest"]) for file in manifest["files"] if file["name"] == "model.safetensors")

    def accuracy(self) -> float:
        """The final test accuracy that it printed."""
        return float(_ACCURACY.findall(self.log)[-1])


def _program(name: str) -> str:
    """A program of this Python environment."""
    return os.fspath(Path(sys.executable).with_name(name))
