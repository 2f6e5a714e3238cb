"""The digits example as a run that tests start, follow and kill, and whose files they read.

Its ledger says which samples were trained on after which commit, and `committed` which batches are part of
the final state. A batch that was trained on after commit ``k`` of generation ``g`` is lost if a later
generation resumed from commit ``k`` or an earlier one.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdrecover.drill.run import Job, Run, wait_until
from hvdrecover.errors import HvdrecoverError
from hvdrecover.events import Follower

PATIENCE = 400.0  # seconds to wait for anything, on a busy machine
TRAINING_SAMPLES = 1437


@dataclass(frozen=True)
class Batch:
    """One rank's part of one training step: a line of `hvdrecover.examples.digits.Ledger`.

    Attributes:
        time: when it was done, in seconds since the Unix epoch.
        pid: the process that did it.
        rank: its rank, or the virtual rank that it carried out.
        size: number of ranks, or of virtual ranks.
        generation: generation of the last commit before it.
        commit: number of the last commit before it.
        epoch: the epoch.
        indices: the samples.
    """

    time: float
    pid: int
    rank: int
    size: int
    generation: int
    commit: int
    epoch: int
    indices: tuple[int, ...]


class DigitsRun(Run):
    """One run of the digits example in its own folder, through any number of starts.

    Args:
        folder: takes its checkpoint root, ledger, events, log and final weights.
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
        """The output of the run's processes."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def start(self, launcher: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Job:
        """Start it, or start it again; without a launcher, as one process."""
        command = [*launcher, sys.executable, *self._program]
        command += ["--epochs", str(self.epochs), "--checkpoint", str(self.root), "--save", str(self.weights)]
        command += ["--ledger", str(self.folder / "ledger"), *self.options]
        return self.launch(command, environ)

    def finish(self, job: Job) -> None:
        """Wait until a job ends with exit code 0.

        Raises:
            HvdrecoverError: the job failed, or still runs.
        """
        try:
            if code := job.wait(PATIENCE):
                raise HvdrecoverError(f"the job ended with exit code {code}; its log ends with\n{job.tail()}")
        finally:
            job.kill()

    def wait_for(self, job: Job, reached: Callable[[Batch], bool], after: float = 0.0) -> Batch:
        """Wait for the first batch after a time for which a function returns true.

        Raises:
            HvdrecoverError: the job ended before, or it took too long.
        """

        def look() -> Batch | None:
            return next((each for each in self.batches() if each.time > after and reached(each)), None)

        found = wait_until(job, look, patience=PATIENCE)
        assert found is not None
        return found

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the recorded events of these kinds, in order of time; without kinds, all events."""
        return read_events(self.folder / "events", *kinds)

    def generations(self) -> dict[int, int]:
        """Return, for each generation, the commit that it resumed from."""
        return {int(event["generation"]): int(event["commit"]) for event in self.events("sync")}

    def batches(self) -> list[Batch]:
        """Return the batches so far, in order of time."""
        # Incomplete lines of killed processes are skipped.
        paths = (self.folder / "ledger").glob("*.jsonl")
        found = (_batch(line) for path in paths for line in path.read_text().splitlines())
        return sorted(filter(None, found), key=lambda batch: batch.time)

    def committed(self) -> list[Batch]:
        """Return the batches that are part of the final state."""
        return committed(self.batches(), self.generations())

    def samples(self, epoch: int) -> Counter[int]:
        """Return how often each sample of an epoch is in the final state."""
        return Counter(index for batch in self.committed() if batch.epoch == epoch for index in batch.indices)

    def process_of(self, rank: int) -> int:
        """Return the process of a rank's last batch."""
        return next(batch.pid for batch in reversed(self.batches()) if batch.rank == rank)


@functools.lru_cache(1 << 16)  # tests that follow a run read the same lines again and again
def _batch(line: str) -> Batch | None:
    try:
        *fields, indices = json.loads(line)
    except ValueError:
        return None
    return Batch(*[*fields, tuple(indices)])


def committed(batches: Sequence[Batch], starts: dict[int, int]) -> list[Batch]:
    """Return the batches that are part of the final state.

    Args:
        batches: all batches.
        starts: generation to the commit that it resumed from, for all generations.
    """
    return [
        batch
        for batch in batches
        if all(start > batch.commit for generation, start in starts.items() if generation > batch.generation)
    ]


def read_events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the facts of the events of a run, in order of time; an empty list before the first event.

    Args:
        folder: the folder of the run.
        kinds: which events; none means all.
    """
    events = sorted(Follower(folder).look(), key=lambda event: event.time)
    return [dict(event.facts) for event in events if not kinds or event.kind in kinds]
