"""Scripts like Horovod's own examples, with only the import line changed, survive kills and restarts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.conftest import LONG, SKLEARN
from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, Job, kill, mpi, supervised, wait_until

SCRIPTS = Path(__file__).with_name("scripts") / "horovods"
# How much the metric may differ from the undisturbed run: after a fault other dropout masks are drawn, and
# batches of the current epoch are repeated, as in Horovod's own elastic mode.
TOLERANCE = 0.08
MODULES = {
    "distributed_sampler.py": "torch",
    "keras_fit.py": "tensorflow.keras",
    "tensorflow_loop.py": "tensorflow",
}

SUPERVISED = supervised("--no-standby")
Begin = Callable[..., Job]

pytestmark = pytest.mark.acceptance


@pytest.fixture
def begin(jobs: list[Job], tmp_path: Path) -> Begin:
    def start(name: str, launcher: Sequence[str] = SUPERVISED, **environ: str) -> Job:
        log, command = tmp_path / f"log-{len(jobs)}", [*launcher, sys.executable]
        # As in an activated environment: horovodrun looks for mpirun on the path.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        settings = {"FOLDER": str(tmp_path), "PATH": path, **SKLEARN, **environ}
        jobs.append(Job([*command, str(SCRIPTS / name)], log, settings))
        return jobs[-1]

    return start


@pytest.mark.parametrize("name", MODULES)
def test_the_import_line_is_all_that_they_have_of_ours(name: str) -> None:
    lines = [line for line in (SCRIPTS / name).read_text().splitlines() if "recover" in line]
    assert lines == [f"import hvdrecover.{MODULES[name]} as hvd"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if module == "torch" else LONG) for name, module in MODULES.items()]
)
def test_killed_in_part_and_as_a_whole_they_end_as_undisturbed(
    name: str, begin: Begin, tmp_path: Path
) -> None:
    expected = result(begin(name, PAUSE="0"))
    settings = {"PAUSE": "0.05", "HVDRECOVER_CHECKPOINT": str(tmp_path / "root")}
    (tmp_path / "closed").touch()  # what a job prints comes late on a busy machine
    job = begin(name, **settings)
    killed = process_at(job, rank=0, epoch=2, batch=3)
    kill(killed)
    process_at(job, rank=0, epoch=3, batch=5, but=killed)
    job.kill()
    (tmp_path / "closed").unlink()
    job = begin(name, **settings)
    found = result(job)
    assert found[0] == pytest.approx(expected[0], abs=TOLERANCE)
    assert found[1:2] == expected[1:2]
    epochs = {int(epoch) for epoch in re.findall(r"progress \d+ \d (\d)", job.log.read_text())}
    assert min(epochs) >= 2, job.tail(80)  # the last commits may not have been durable yet


@LONG
def test_adasum_by_mpi_is_resumed_and_without_it_the_job_ends_with_words(
    begin: Begin, tmp_path: Path
) -> None:
    name = "distributed_sampler.py"
    settings = {"OP": "Adasum", "PAUSE": "0.05", "HVDRECOVER_CHECKPOINT": str(tmp_path / "root")}
    settings |= ROOT_MAY_USE_MPI
    (tmp_path / "closed").touch()
    job = begin(name, mpi(2), **settings)
    process_at(job, rank=0, epoch=3, batch=5)
    job.kill()
    (tmp_path / "closed").unlink()
    job = begin(name, mpi(2), **settings)
    accuracy, epoch, *_ = result(job)
    assert (accuracy > 0.6, epoch) == (True, 4)
    assert not re.search(r"progress \d+ \d 1 ", job.log.read_text())
    job = begin(name, OP="Adasum", PAUSE="0")
    assert job.wait(PATIENCE) != 0
    assert re.search("op: Adasum .*horovodrun --mpi", job.tail(80))


def result(job: Job) -> list[float]:
    """Wait for the end; return the numbers that the script prints last: its metric, the epoch, and more."""
    assert job.wait(PATIENCE) == 0, job.tail(80)
    line = re.findall(r"result (.*)", job.log.read_text())[-1]
    return [float(number) for number in re.findall(r"[\d.]+", line)]


def process_at(job: Job, rank: int, epoch: int, batch: int, but: int = 0) -> int:
    """Wait until a rank is at a batch of an epoch, or beyond it; return its process."""

    def look() -> int:
        for process, *numbers in re.findall(r"progress (\d+) (\d+) (\d+) (\d+)", job.log.read_text()):
            place = [int(number) for number in numbers]
            if place[0] == rank and place[1:] >= [epoch, batch] and int(process) != but:
                return int(process)
        return 0

    return wait_until(job, look, f"batch {batch} of epoch {epoch}")
