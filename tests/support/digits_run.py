"""The digits example as a run that tests start, follow and kill, and whose files they read."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover.drill.run import Job, Run, wait_until
from hvdrecover.errors import HvdrecoverError
from hvdrecover.record import Follower
from tests.support import ledger
from tests.support.ledger import Batch

PATIENCE = 400.0  # seconds to wait for anything, on a busy machine
TRAINING_SAMPLES = 1437
_ACCURACY = re.compile(r"test accuracy ([\d.]+)")


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
        return ledger.read(self.folder / "ledger")

    def committed(self) -> list[Batch]:
        """Return the batches that are part of the final state."""
        return ledger.committed(self.batches(), self.generations())

    def samples(self, epoch: int) -> Counter[int]:
        """Return how often each sample of an epoch is in the final state."""
        return Counter(index for batch in self.committed() if batch.epoch == epoch for index in batch.indices)

    def process_of(self, rank: int) -> int:
        """Return the process of a rank's last batch."""
        return next(batch.pid for batch in reversed(self.batches()) if batch.rank == rank)

    def accuracy(self) -> float:
        """Return the final test accuracy that it printed."""
        return float(_ACCURACY.findall(self.log)[-1])


def read_events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the facts of the events of a run, in order of time; an empty list before the first event.

    Args:
        folder: the folder of the run.
        kinds: which events; none means all.
    """
    events = sorted(Follower(folder).look(), key=lambda event: event.time)
    return [dict(event.facts) for event in events if not kinds or event.kind in kinds]
