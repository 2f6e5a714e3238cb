"""The digits job under ``hvdrecover run``: a worker is killed, one hangs, all are killed, and the costs.

With torch it has two virtual ranks, so it must end with exactly the weights of an undisturbed single process.

Run it by ``scripts/demo``, or by ``python -m hvdrecover.examples.demo`` where Horovod is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from hvdrecover.drill.jobs import supervised, wait_until
from hvdrecover.errors import HvdrecoverError
from hvdrecover.examples.digits_run import TRAINING_SAMPLES, DigitsRun
from hvdrecover.launch.job import Job
from hvdrecover.launch.processes import kill

EPOCHS = 14
WORKERS = 2
_OPTIONS = {"torch": ("--virtual-ranks", "2"), "tensorflow": ()}
_ALONE = {"torch": (), "tensorflow": ("--batch-size", "32")}  # one process does the work of two
_HANG_SECONDS = "5"


@dataclass(frozen=True)
class Fault:
    """The cost of one fault.

    Attributes:
        name: what happened.
        before: the last commit before it.
        after: the commit that training resumed from.
        seconds: from the fault to the end of the next training step.
        repeated: samples that were trained on again.
    """

    name: str
    before: int
    after: int
    seconds: float
    repeated: int


def main(arguments: list[str] | None = None) -> int:
    """Run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hvdrecover.examples.demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs, events and commits here")
    parser.add_argument("--framework", choices=tuple(_OPTIONS), default="torch")
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
            record = options.keep / "killed" / "events"
            console.print(f"its story: hvdrecover report {record}", soft_wrap=True, markup=False)
        shutil.rmtree(folder)


def _demo(folder: Path, framework: str, console: Console) -> int:
    options = _OPTIONS[framework]
    alone = DigitsRun(folder / "alone", EPOCHS, *options, *_ALONE[framework], framework=framework)
    killed = DigitsRun(folder / "killed", EPOCHS, "--step-seconds", "0.02", *options, framework=framework)
    console.print(f"1. {EPOCHS} epochs of digits in one process, undisturbed …")
    undisturbed = alone.start()
    try:
        console.print(f"2. the same under hvdrecover run -np {WORKERS} …")
        faults = _train_with_faults(killed, console)
        alone.finish(undisturbed)
    finally:
        undisturbed.kill()
    _show(console, faults, alone, killed)
    problems = _problems(killed, alone, same="--virtual-ranks" in options)
    for problem in problems:
        console.print(f"NOT AS PROMISED: {problem}", style="red")
    return 1 if problems else 0


def _train_with_faults(run: DigitsRun, console: Console) -> list[Fault]:
    launcher = supervised("--hang-timeout", _HANG_SECONDS, workers=WORKERS)
    job = run.start(launcher)
    faults = []
    try:
        run.wait_for(job, lambda batch: batch.commit >= 4)
        _wait_for_standbys(run, job, latest=60)
        console.print("   SIGKILL to the worker of rank 0; its standby takes over …")
        struck = time.time()
        kill(run.process_of(rank=0))
        faults.append(_measure(job, run, "worker killed", struck))
        _wait_for_standbys(run, job, latest=100)
        console.print(f"   SIGSTOP to the worker of rank 1; it may hang for {_HANG_SECONDS} s …")
        struck = time.time()
        os.kill(run.process_of(rank=1), signal.SIGSTOP)
        faults.append(_measure(job, run, "worker hangs", struck))
        # A start after a generation without commits would use the number of that generation again.
        run.wait_for(job, lambda batch: batch.commit >= faults[-1].after + 9, after=time.time())
        console.print("   SIGKILL to workers, launcher and supervisor; started again …")
        struck = time.time()
        job.kill()
        job = run.start(launcher)
        faults.append(_measure(job, run, "all killed", struck))
        run.finish(job)
    finally:
        job.kill()
    return faults


def _wait_for_standbys(run: DigitsRun, job: Job, latest: int) -> None:
    """Wait until each worker has a standby, as it nearly always has when a fault strikes a long job.

    Args:
        run: the run.
        job: its start.
        latest: the commit after which a busy machine is not waited for any longer.
    """

    def look() -> bool:
        ready = {event.get("slot"): event.get("ready") is True for event in run.events("standby")}
        return sum(ready.values()) == WORKERS or run.batches()[-1].commit >= latest

    wait_until(job, look, "standbys")


def _measure(job: Job, run: DigitsRun, name: str, struck: float) -> Fault:
    """Wait until a training step has been done after a fault, and look at what was lost."""
    last = max((b for b in run.batches() if b.time <= struck), key=lambda b: (b.generation, b.commit))
    following = run.wait_for(job, lambda batch: batch.generation > last.generation, after=struck)
    # A batch is recorded before its step, so the next batch of the same rank shows that the step was done.
    mine = (following.pid, following.rank)
    second = run.wait_for(job, lambda batch: (batch.pid, batch.rank) == mine, after=following.time)
    start, batches = run.generations()[following.generation], run.batches()
    lost = [batch for batch in batches if batch.generation <= last.generation and batch.commit >= start]
    repeated = sum(len(batch.indices) for batch in lost)
    return Fault(name, last.commit, start, second.time - struck, repeated)


def _problems(killed: DigitsRun, clean: DigitsRun, *, same: bool) -> list[str]:
    problems = []
    for epoch in range(EPOCHS):
        seen = killed.samples(epoch)
        if len(seen) != TRAINING_SAMPLES:
            problems.append(f"epoch {epoch}: {TRAINING_SAMPLES - len(seen)} samples were lost")
        if seen.total() - TRAINING_SAMPLES > 1:  # one is padding: an odd number of samples for two workers
            problems.append(f"epoch {epoch}: {seen.total() - TRAINING_SAMPLES} samples are committed twice")
    if killed.accuracy() < clean.accuracy() - 0.03:
        problems.append("the run with faults ended less accurate than the undisturbed one")
    if same and killed.digest() != clean.digest():
        problems.append("the run with faults ended with other weights than the undisturbed one")
    return problems


def _show(console: Console, faults: list[Fault], alone: DigitsRun, killed: DigitsRun) -> None:
    table = Table("", "fault")
    for heading in ("last commit", "resumed from", "next step", "repeated"):
        table.add_column(heading, justify="right")
    for number, fault in enumerate(faults, 1):
        cells = (str(fault.before), str(fault.after), f"{fault.seconds:.1f} s", f"{fault.repeated} samples")
        table.add_row(str(number), fault.name, *cells)
    console.print(table)
    results = Table("run", Column("test accuracy", justify="right"), "digest of the weights")
    for name, run in (("one process, undisturbed", alone), ("two workers, these faults", killed)):
        results.add_row(name, f"{run.accuracy():.1%}", run.digest())
    console.print(results)
    if alone.digest() == killed.digest():
        console.print("The weights are the same, bit by bit.", style="green")
    padding = sum(killed.samples(epoch).total() - TRAINING_SAMPLES for epoch in range(EPOCHS))
    console.print(
        f"committed samples: {TRAINING_SAMPLES} in each of {EPOCHS} epochs, each once; {padding} as padding"
    )


if __name__ == "__main__":
    sys.exit(main())
