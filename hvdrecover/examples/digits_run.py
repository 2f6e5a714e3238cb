"""The digits example as a run that can be started, watched, killed and looked at afterwards."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdrecover.drill.jobs import Run, wait_until
from hvdrecover.examples import ledger
from hvdrecover.examples.ledger import Batch
from hvdrecover.launch.job import Job

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
        self._options = options
        self._framework = framework
        self._program = list(program) or ["-m", f"hvdrecover.examples.{framework}_digits"]

    @property
    def weights(self) -> Path:
        """The file of final weights, optimizer state and accuracy."""
        return self.folder / ("final.pt" if self._framework == "torch" else "final.npz")

    def start(self, launcher: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Job:
        """Start it, or start it again; without a launcher, as one process."""
        command = [*launcher, sys.executable, *self._program]
        command += ["--epochs", str(self.epochs), "--checkpoint", str(self.root), "--save", str(self.weights)]
        command += ["--ledger", str(self.folder / "ledger"), *self._options]
        return self.launch(command, environ)

    def wait_for(self, job: Job, reached: Callable[[Batch], bool], after: float = 0.0) -> Batch:
        """Wait for the first batch after a time for which a function returns true.

        Raises:
            HvdrecoverError: the job ended before, or it took too long.
        """

        def look() -> Batch | None:
            return next((each for each in self.batches() if each.time > after and reached(each)), None)

        found = wait_until(job, look)
        assert found is not None
        return found

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

    def digest(self) -> str:
        """Return the digest of the final weights, from the manifest of the last commit."""
        manifest = json.loads(max(self.root.glob("g*/MANIFEST.json")).read_text())
        return next(str(file["digest"]) for file in manifest["files"] if file["name"] == "model.safetensors")

    def accuracy(self) -> float:
        """Return the final test accuracy that it printed."""
        return float(_ACCURACY.findall(self.log)[-1])
