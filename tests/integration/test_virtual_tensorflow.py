"""Virtual ranks in TensorFlow end with the same bits on any number of processes, whatever happens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LONG
from tests.support.jobs import elastic, run_job, static

SCRIPT = Path(__file__).with_name("scripts") / "virtual_tensorflow.py"
OPTIMIZERS = ["adam", pytest.param("sgd", marks=LONG)]


Ending = tuple[list[dict[str, str]], dict[str, list[float]]]
"""The digests that each process ends with, and the losses of each virtual rank."""

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module", params=OPTIMIZERS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ending]:
    """The optimizer, and how a run of one process ends."""
    ending = run(tmp_path_factory.mktemp("alone"), [], OPTIMIZER=request.param, OMP_NUM_THREADS="1")
    assert [len(losses) for losses in ending[1].values()] == [21] * 4
    assert len(set(map(str, ending[1].values()))) == 4
    return request.param, ending


def run(folder: Path, launcher: Sequence[str], **environ: str) -> Ending:
    command = [*launcher, sys.executable, str(SCRIPT)]
    run_job(command, folder / "log.txt", {"FOLDER": str(folder), **environ})
    reports: Any = [json.loads(path.read_text()) for path in sorted(folder.glob("report-*"))]
    return [digests for digests, _ in reports], {
        rank: found for _, losses in reports for rank, found in losses.items()
    }


@pytest.mark.parametrize("processes", [pytest.param(2, marks=LONG), 3, pytest.param(4, marks=LONG)])
def test_the_number_of_processes_makes_no_difference(
    alone: tuple[str, Ending], processes: int, tmp_path: Path
) -> None:
    optimizer, (digests, losses) = alone
    assert run(tmp_path, static(processes), OPTIMIZER=optimizer) == (digests * processes, losses)


@LONG
def test_a_worker_that_is_killed_and_one_that_comes_make_no_difference(
    alone: tuple[str, Ending], hosts: Path, tmp_path: Path
) -> None:
    optimizer, (digests, losses) = alone
    found = run(tmp_path, elastic(hosts), OPTIMIZER=optimizer, HOSTS=str(hosts), KILLED="5 2")
    assert found == (digests * 2, losses)
    sizes = json.loads((tmp_path / "sizes").read_text())
    assert [size for size, _ in groupby(sizes)] == [2, 1, 2]
