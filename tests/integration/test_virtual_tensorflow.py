"""Virtual ranks in TensorFlow end with the same bits on any number of processes, whatever happens to these."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.examples.digits_run import PATIENCE, elastic, static
from hvdrecover.launch.job import Job
from tests.integration.conftest import LONG

SCRIPT = Path(__file__).with_name("scripts") / "virtual_tensorflow.py"
OPTIMIZERS = ["adam", pytest.param("sgd", marks=LONG)]


@pytest.fixture(scope="module", params=OPTIMIZERS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The optimizer, and what one process ends with."""
    optimizer = request.param
    folder = tmp_path_factory.mktemp("alone")
    (report,) = reports(folder, [], OPTIMIZER=optimizer, OMP_NUM_THREADS="1")
    assert {each[1] for each in report["losses"]} == {21}  # a loss of each virtual rank in each step
    assert len(set(map(str, report["losses"]))) == 4
    return optimizer, report


def reports(folder: Path, launcher: Sequence[str], **environ: str) -> list[Any]:
    """Run the script to its end; return the report of each process that is left."""
    settings: Mapping[str, str] = {"FOLDER": str(folder), **environ}
    job = Job([*launcher, sys.executable, str(SCRIPT)], folder / "log.txt", settings)
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report-*"))]


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=LONG), 2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)]
)
def test_the_number_of_processes_makes_no_difference(
    alone: tuple[str, Any], processes: int, tmp_path: Path
) -> None:
    optimizer, expected = alone
    assert reports(tmp_path, static(processes), OPTIMIZER=optimizer) == [expected] * processes


def test_a_worker_that_is_killed_and_one_that_comes_make_no_difference(
    alone: tuple[str, Any], hosts: Path, tmp_path: Path
) -> None:
    optimizer, expected = alone
    found = reports(tmp_path, elastic(hosts), OPTIMIZER=optimizer, HOSTS=str(hosts), KILLED="5 2")
    assert found == [expected] * 2
    sizes = json.loads((tmp_path / "sizes").read_text())
    assert [size for size, _ in groupby(sizes)] == [2, 1, 2]
