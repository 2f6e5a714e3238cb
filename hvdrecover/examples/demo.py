"""The main job, killed twice: a real ``horovodrun`` with two workers, SIGKILL, and what it cost.

With torch it has two virtual ranks, and so the very same result as undisturbed.

Run it by ``scripts/demo``, or by ``python -m hvdrecover.examples.demo`` where Horovod is installed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from hvdrecover.errors import HvdrecoverError
from hvdrecover.examples.digits_run import TRAINING_SAMPLES, DigitsRun, elastic
from hvdrecover.launch.job import Job
from hvdrecover.launch.processes import kill

EPOCHS = 15
OPTIONS = {"torch": ("--virtual-ranks", "2"), "tensorflow": ()}


@dataclass(frozen=True)
class Fault:
    """The cost of one fault.

    Attributes:
        name: what was killed.
        workers: number of workers before and after.
        before: the last commit before it.
        after: the commit that training resumed from.
        seconds: from the kill to the end of the next training step, that step's pretended length included.
        repeated: samples whose training had been begun after that commit, and was again.
    """

    name: str
    workers: tuple[int, int]
    before: int
    after: int
    seconds: float
    repeated: int


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hvdrecover.examples.demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs, events and commits here")
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="hvdrecover-demo-"))
    try:
        return _demo(folder, options.framework, console)
    except HvdrecoverError as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return 1
    finally:
        if options.keep:
            shutil.copytree(folder, options.keep)
        shutil.rmtree(folder)


def _demo(folder: Path, framework: str, console: Console) -> int:
    # Two names of this host, so that Horovod sees two hosts: it gives up a host on which a worker failed.
    hosts = folder / "hosts"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    options = ("--step-seconds", "0.01", *OPTIONS[framework])
    clean = DigitsRun(folder / "clean", EPOCHS, *options, framework=framework)
    killed = DigitsRun(folder / "killed", EPOCHS, *options, framework=framework)
    console.print(f"1. training {EPOCHS} epochs of digits with 2 workers, undisturbed …")
    clean.finish(clean.start(elastic(hosts)))
    console.print(f"   test accuracy {clean.accuracy():.1%}")
    faults = _train_with_faults(killed, elastic(hosts), console)
    _show(console, faults, clean, killed)
    problems = _problems(killed, clean, same="--virtual-ranks" in options)
    for problem in problems:
        console.print(f"NOT AS PROMISED: {problem}", style="red")
    return 1 if problems else 0


def _train_with_faults(run: DigitsRun, launcher: list[str], console: Console) -> list[Fault]:
    console.print("2. training the same again …")
    job = run.start(launcher)
    try:
        batch = run.wait_for(job, lambda batch: batch.epoch == 4 and batch.commit % 9 == 4)
        console.print(f"   epoch {batch.epoch}: SIGKILL to the worker of rank 0; the other one goes on …")
        struck = time.time()
        kill(run.process_of(rank=0))
        one = _measure(job, run, "one worker", struck)
        batch = run.wait_for(job, lambda batch: batch.epoch == 9 and batch.commit % 9 == 4)
        console.print(f"   epoch {batch.epoch}: SIGKILL to the launcher and all workers; started again …")
        struck = time.time()
        job.kill()
        job = run.start(launcher)
        whole = _measure(job, run, "whole job", struck)
        run.finish(job)
    finally:
        job.kill()
    return [one, whole]


def _measure(job: Job, run: DigitsRun, name: str, struck: float) -> Fault:
    """Wait until a training step has been done after a fault, and look at what was lost."""
    last = max((b for b in run.batches() if b.time <= struck), key=lambda b: (b.generation, b.commit))
    following = run.wait_for(job, lambda batch: batch.generation > last.generation, after=struck)
    # A batch is written down before its step, so the one after it tells that the step was done.
    mine = (following.pid, following.rank)
    second = run.wait_for(job, lambda batch: (batch.pid, batch.rank) == mine, after=following.time)
    start, batches = run.generations()[following.generation], run.batches()
    lost = [batch for batch in batches if batch.generation <= last.generation and batch.commit >= start]
    before, after = (
        len({batch.pid for batch in batches if batch.generation == generation})
        for generation in (last.generation, following.generation)
    )
    return Fault(
        name=name,
        workers=(before, after),
        before=last.commit,
        after=start,
        seconds=second.time - struck,
        repeated=sum(len(batch.indices) for batch in lost),
    )


def _problems(killed: DigitsRun, clean: DigitsRun, *, same: bool) -> list[str]:
    problems = []
    for epoch in range(EPOCHS):
        seen = killed.samples(epoch)
        if len(seen) != TRAINING_SAMPLES:
            problems.append(f"epoch {epoch}: {TRAINING_SAMPLES - len(seen)} samples were lost")
        if seen.total() - TRAINING_SAMPLES > 1:  # one is padding: an odd number, dealt out to two workers
            problems.append(f"epoch {epoch}: {seen.total() - TRAINING_SAMPLES} samples are committed twice")
    if killed.accuracy() < clean.accuracy() - 0.03:
        problems.append("the run with faults ended less accurate than the undisturbed one")
    if same and killed.digest() != clean.digest():
        problems.append("the run with faults ended with other weights than the undisturbed one")
    return problems


def _show(console: Console, faults: list[Fault], clean: DigitsRun, killed: DigitsRun) -> None:
    table = Table()
    for heading in ("SIGKILL of", "workers", "last commit", "resumed from", "next step", "repeated"):
        table.add_column(heading, justify="left" if heading == "SIGKILL of" else "right")
    for fault in faults:
        workers = f"{fault.workers[0]} → {fault.workers[1]}"
        table.add_row(
            fault.name,
            workers,
            str(fault.before),
            str(fault.after),
            f"{fault.seconds:.1f} s",
            f"{fault.repeated} samples",
        )
    console.print(table)
    results = Table("run", Column("test accuracy", justify="right"), "digest of the weights")
    for name, run in (("undisturbed", clean), ("with these faults", killed)):
        results.add_row(name, f"{run.accuracy():.1%}", run.digest())
    console.print(results)
    padding = sum(killed.samples(epoch).total() - TRAINING_SAMPLES for epoch in range(EPOCHS))
    console.print(
        f"committed samples: {TRAINING_SAMPLES} in each of {EPOCHS} epochs, each once; {padding} as padding"
    )


if __name__ == "__main__":
    sys.exit(main())
