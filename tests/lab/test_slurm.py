"""``examples/slurm/train.sbatch`` in a real Slurm: preempted, at its time limit, on other nodes, cancelled."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdrecover.checkpoint.near import place
from hvdrecover.drill.lab.lab import Lab
from hvdrecover.examples.digits_run import PATIENCE, TRAINING_SAMPLES, DigitsRun
from hvdrecover.examples.ledger import Batch
from tests.integration.conftest import LONG
from tests.integration.faults import FaultyRun
from tests.lab import slurm
from tests.lab.slurm import Slurm

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
TRAIN = "from hvdrecover.examples.torch_digits import main\nmain()\n"
EPOCHS = 200  # more than any test waits for
LEFT = "75:0"  # as Slurm shows an exit code


@pytest.fixture
def cluster(lab: Lab) -> Iterator[Slurm]:
    if why := slurm.lacks():
        pytest.skip(why)
    made = Slurm(lab)
    yield made
    made.close()


class SlurmRun(FaultyRun):
    """A digits job that is submitted as the example says.

    Args:
        folder: where it is submitted.
        cluster: where to.
        options: those of ``sbatch``, before the example's own.
        epochs: how long to train.
    """

    def __init__(self, folder: Path, cluster: Slurm, *options: str, epochs: int = EPOCHS) -> None:
        super().__init__(folder, "torch", (), epochs, "--step-seconds", "0.04")
        self.cluster = cluster
        (folder / "train.py").write_text(TRAIN)
        words = ["--epochs", str(epochs), "--step-seconds", "0.04", "--ledger", str(folder / "ledger")]
        path = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
        submitted = cluster.run(
            "sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/log.txt", *options,
            os.fspath(EXAMPLE), *words,
            environ={"PATH": path, "HVDRECOVER_EVENTS": str(folder / "events")},
        )
        self.id = submitted.strip()

    @property
    def root(self) -> Path:
        return self.folder / "checkpoints" / "train"

    def shown(self) -> dict[str, str]:
        return self.cluster.job(self.id)

    # As a job of `Start` has them.
    @property
    def running(self) -> bool:
        return self.shown()["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def tail(self) -> str:
        return self.log[-4000:] + self.cluster.log()

    def trains(self, size: int, after: int = 0) -> Batch:
        return self.wait_for(self, lambda batch: batch.size == size and batch.generation > after)  # type: ignore[arg-type]

    def until(self, reached: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Wait until something is true of what Slurm says of it."""
        deadline = time.monotonic() + PATIENCE
        while not reached(shown := self.shown()):
            assert time.monotonic() < deadline, f"{shown}\n{self.tail()}"
            time.sleep(0.2)
        return shown

    def generation(self) -> int:
        return self.batches()[-1].generation


def test_trial(cluster: Slurm, tmp_path: Path) -> None:
    t=time.time()
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=3", "--ntasks-per-node=1")
    run.trains(3)
    print("trains", time.time()-t)
    after=run.generation()
    run.cluster.run("scancel", "--batch", "--signal=TERM", run.id)
    t=time.time()
    run.until(lambda shown: shown["Restarts"]=="1")
    print("requeued", time.time()-t)
    print(run.shown())
    run.trains(3, after)
    print("again", time.time()-t)
    print(run.log)
    print(run.generations())
    run.cluster.run("scancel", run.id)
    run.until(lambda shown: shown["JobState"]=="CANCELLED")
    print(run.shown())
    print(run.log)
    time.sleep(3)
    print(run.shown())
    assert 0
