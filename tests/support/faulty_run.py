"""Runs of the digits examples that suffer faults, and assertions about their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.support.jobs import (
    GUARDIAN,
    TRAINING_SAMPLES,
    Batch,
    DigitsRun,
    Job,
    committed,
    durable,
    running,
    supervised,
)

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
EPOCHS = 6  # of runs with many faults, and of the run that they are compared with
SLOW = ("--step-seconds", "0.1")  # so that many faults fit into a run
PATIENT = ("--grace", "300")  # seconds; a commit comes sooner, also on a machine that has much else to do
HOLD = "hold step 0 12"  # for faults that the test itself lets strike: the run does not end before
SECRET = "a-key-that-nobody-else-may-see"


class FaultyRun(DigitsRun):
    """A digits run with faults: lines for its script; `sizes`: epoch to the awaited size of the world."""

    script = "faulty_digits.py"

    def __init__(
        self,
        folder: Path,
        framework: str,
        faults: Sequence[str] = (),
        epochs: int = EPOCHS,
        *options: str,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        program = (str(SCRIPTS / self.script), framework)
        super().__init__(folder, epochs, *SLOW, *options, framework=framework, program=program)
        self.sizes = dict(sizes or {})
        self.faults = {"FAULTS": "\n".join(faults), "FAULTS_STRUCK": str(folder / "struck")}
        self._closed = [number for number, line in enumerate(faults) if line.startswith("hold ")]

    def start(self, launcher: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Job:
        sizes = " ".join(f"{epoch}:{size}" for epoch, size in self.sizes.items())
        return super().start(launcher, {**self.faults, "SIZES": sizes, **(environ or {})})

    def begin(
        self,
        start: Callable[..., Job],
        *options: str,
        standby: bool = False,
        environ: dict[str, str] | None = None,
    ) -> Job:
        """Start it under ``hvdrecover run``, with more options of that; a standby costs as much as a rank."""
        return start(self, supervised(*(options if standby else ("--no-standby", *options))), environ)

    def open(self) -> None:
        """Have the rank continue that holds, or will hold, first."""
        (self.folder / f"open-{self._closed.pop(0)}").touch()

    def sources(self) -> dict[int, str]:
        """Generation to where its state came from."""
        return {event["generation"]: event["source"] for event in self.events("sync")}


def a_run(folder: Path, *faults: str, framework: str = "torch") -> FaultyRun:
    return FaultyRun(folder / "run", framework, faults, 2, "--step-seconds", "0.06")


def a_long_run(
    folder: Path,
    *options: str,
    epochs: int = 3,
    framework: str = "torch",
    gates: Sequence[int] = (),
    sizes: Mapping[int, int] | None = None,
) -> FaultyRun:
    """A run that the test kills. At the commits of ``gates`` it holds until the test opens each, in order."""
    holds = [f"hold step 0 {commit}" for commit in gates]
    return FaultyRun(folder, framework, holds, epochs, "--step-seconds", "0.04", *options, sizes=sizes)


def kill_in_epoch(run: FaultyRun, job: Job, epoch: int, commits: int) -> None:
    """Kill a job a few commits into an epoch, once one is durable; a gate there waits for slow writes."""
    first = run.wait_for(job, lambda batch: batch.epoch == epoch)
    run.wait_for(
        job, lambda batch: batch.commit >= first.commit + commits and durable(run.root) > first.commit
    )
    job.kill()
    run.open()


def wait_for_durable(run: DigitsRun, job: Job, commit: int) -> None:
    """Wait until some commits are made, and one of them is durable: on a busy machine writes lag behind."""
    run.wait_for(job, lambda batch: batch.commit >= commit and durable(run.root) > 0)


def wait_until_all_train(run: DigitsRun, job: Job, after: int, size: int = 2) -> Batch:
    """Wait until a number of ranks have all trained after a generation; the first batch of that."""
    first = run.wait_for(job, lambda batch: batch.generation > after and batch.size == size)

    def trains(batch: Batch, rank: int) -> bool:
        return batch.rank == rank and batch.generation >= first.generation

    for rank in range(size):
        run.wait_for(job, partial(trains, rank=rank))
    return first


def assert_no_step_is_lost(run: DigitsRun) -> None:
    """Assert that all batches so far count; looks once, as a job that still runs trains more meanwhile."""
    batches = run.batches()
    assert len(committed(batches, run.generations())) == len(batches)


def assert_each_sample_once(run: DigitsRun, *, padding: int, epochs: int | None = None) -> None:
    """Assert that each epoch of the final state has each sample once, and at most some more as padding."""
    for epoch in range(run.epochs if epochs is None else epochs):
        seen = run.samples(epoch)
        assert set(seen) == set(range(TRAINING_SAMPLES))
        assert seen.total() - TRAINING_SAMPLES <= padding


def assert_same_weights(run: DigitsRun, clean: DigitsRun) -> None:
    """Assert that two runs have ended with the same weights, optimizer state and accuracy, bit for bit."""
    mine, theirs = (_final(each.weights) for each in (run, clean))
    assert mine.keys() == theirs.keys() and len(mine) > 6
    assert [name for name, value in mine.items() if value != theirs[name]] == []


def _final(path: Path) -> dict[str, object]:
    """Return the final values that an example saved, tensors as bytes."""
    if path.suffix == ".npz":
        return {name: array.tobytes() for name, array in np.load(path).items()}
    saved = torch.load(path)
    found = {"accuracy": saved["accuracy"], **saved["model"]}
    for number, entries in saved["optimizer"]["state"].items():
        found |= {f"optimizer {number} {name}": value for name, value in entries.items()}
    return {
        name: value.numpy().tobytes() if torch.is_tensor(value) else value for name, value in found.items()
    }


def assert_private(job: Job, size: int = 2) -> None:
    """Assert that all guardians have the token and the user's secret, and no command line shows them."""
    guardians = running(job, *GUARDIAN)
    assert len(guardians) == size
    for guardian in guardians:
        variables = dict(word.split(b"=", 1) for word in _words(guardian, "environ") if b"=" in word)
        assert variables[b"AWS_SECRET_ACCESS_KEY"] == SECRET.encode()
        token = variables[b"HVDRECOVER_SUPERVISOR"].rpartition(b":")[2]
        assert len(token) == 32
        for entry in Path("/proc").iterdir():
            line = b" ".join(_words(int(entry.name), "cmdline")) if entry.name.isdigit() else b""
            assert token not in line and SECRET.encode() not in line, line


def _words(process: int, file: str) -> list[bytes]:
    """Return the words of a process's command line or environment; empty if the process is gone."""
    try:
        return Path(f"/proc/{process}/{file}").read_bytes().split(b"\0")
    except OSError:
        return []
