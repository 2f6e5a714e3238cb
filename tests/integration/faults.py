"""Runs under ``hvdrecover run`` to which something happens, and what they wrote about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.integration import test_kill_and_resume, test_tensorflow
from tests.integration.conftest import EPOCHS
from tests.support import ledger
from tests.support.jobs import Batch, DigitsRun, Job, durable, supervised

SCRIPTS = Path(__file__).with_name("scripts")
SLOW = ("--step-seconds", "0.1")  # so that many faults, and what is done between them, fit into a run
PATIENT = ("--grace", "300")  # seconds; a commit comes sooner, also on a machine that has much else to do
HOLD = "hold step 0 12"  # for faults that the test itself lets strike: the run does not end before


class FaultyRun(DigitsRun):
    """A run of the digits example with faults in it.

    Args:
        folder: for all that belongs to it.
        framework: whose example.
        faults: the lines of its script.
        epochs: how long to train.
        options: more options of the example.
    """

    script = "faulty_digits.py"

    def __init__(
        self, folder: Path, framework: str, faults: Sequence[str] = (), epochs: int = EPOCHS, *options: str
    ) -> None:
        program = (str(SCRIPTS / self.script), framework)
        super().__init__(folder, epochs, *SLOW, *options, framework=framework, program=program)
        self.faults = {"FAULTS": "\n".join(faults), "FAULTS_STRUCK": str(folder / "struck")}

    def begin(
        self,
        start: Callable[..., Job],
        *options: str,
        standby: bool = False,
        environ: dict[str, str] | None = None,
    ) -> Job:
        """Start it under ``hvdrecover run``, with more options of that; a standby costs as much as a rank."""
        words = options if standby else ("--no-standby", *options)
        return start(self, supervised(*words), {**self.faults, **(environ or {})})

    def open(self) -> None:
        """Have a rank that holds continue."""
        (self.folder / "open").touch()

    def sources(self) -> dict[int, str]:
        """Generation to where its state came from."""
        return {event["generation"]: event["source"] for event in self.events("sync")}


def a_run(folder: Path, *faults: str, framework: str = "torch") -> FaultyRun:
    """A short run, with faults in it."""
    return FaultyRun(folder / "run", framework, faults, 2, "--step-seconds", "0.06")


def wait_for_durable(run: DigitsRun, job: Job, commit: int) -> None:
    """Wait until some commits are made, and one of them is durable: on a busy machine writes lag behind."""
    run.wait_for(job, lambda batch: batch.commit >= commit and durable(run.root) > 0)


def wait_until_all_train(run: DigitsRun, job: Job, after: int, size: int = 2) -> Batch:
    """Wait until a number of ranks have all trained after a generation; the first batch of that.

    Args:
        run: the run.
        job: its start.
        after: the generation.
        size: the number.
    """
    first = run.wait_for(job, lambda batch: batch.generation > after and batch.size == size)
    for rank in range(size):
        run.wait_for(
            job, lambda batch, rank=rank: batch.rank == rank and batch.generation >= first.generation
        )
    return first


def assert_no_step_is_lost(run: DigitsRun) -> None:
    """Assert that all batches so far count; looks once, as a job that still runs trains more meanwhile."""
    batches = run.batches()
    assert len(ledger.committed(batches, run.generations())) == len(batches)


def assert_same_weights(framework: str, run: DigitsRun, clean: DigitsRun) -> None:
    """Both have ended with the same weights, optimizer state and accuracy, bit for bit."""
    same = {"torch": test_kill_and_resume, "tensorflow": test_tensorflow}[framework].assert_same_weights
    same(run, clean)
