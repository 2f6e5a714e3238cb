"""Scalars of real jobs of two ranks, read back from their event files; what they do is in the scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integration.scalars import Run, read
from tests.support.jobs import ROOT_MAY_USE_MPI, run_job, static

pytestmark = pytest.mark.acceptance

SCRIPT = Path(__file__).with_name("scripts") / "torch_scalars.py"
STEPS, COMMIT_EVERY = 36, 4
STOP = 27  # the first start stops here, and the second one continues after the commit before
# The second epoch: in the first steps of a start, graphs are made, and data read ahead.
SETTLED = range(13, 25)

Runs = dict[int, Run]


def run(folder: Path, *stop: str) -> None:
    command = [*static(2), sys.executable, str(SCRIPT), str(folder), *stop]
    environ = {"OMP_NUM_THREADS": "1", **ROOT_MAY_USE_MPI}
    run_job(command, folder / "log", environ, code=None if stop else 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job that was stopped, and has continued to its end."""
    made = tmp_path_factory.mktemp("scalars")
    run(made, str(STOP))
    stopped = read(made / "logs" / "rank-0")
    assert list(stopped.scalars["loss"]) == list(range(1, STOP + 1))
    run(made)
    return made


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    return {rank: read(folder / "logs" / f"rank-{rank}") for rank in (0, 1)}


def test_each_step_is_there_once_though_the_job_was_stopped(runs: Runs) -> None:
    each_step = ["loss", "norm/averaged_gradient", "seconds/step", "seconds/allreduce_wait"]
    for run in runs.values():
        for name in each_step:
            assert run.steps[name] == list(range(1, STEPS + 1)), name
        assert run.steps["seconds/commit_stall"] == list(range(COMMIT_EVERY, STEPS + 1, COMMIT_EVERY))
        times = [run.times[step] for step in range(1, STEPS + 1)]
        assert times == sorted(times)


def test_the_loss_is_what_the_script_has_computed(folder: Path, runs: Runs) -> None:
    for rank, run in runs.items():
        told = json.loads((folder / f"losses-{rank}.json").read_text())
        assert {str(step): pytest.approx(value) for step, value in run.scalars["loss"].items()} == told
    assert runs[0].scalars["loss"] != runs[1].scalars["loss"]


def test_averaged_gradients_are_the_same_on_all_ranks(runs: Runs) -> None:
    averaged = runs[0].scalars["norm/averaged_gradient"]
    assert runs[1].scalars["norm/averaged_gradient"] == averaged
    assert all(norm > 0.0 for norm in averaged.values())


def test_the_fast_rank_waits_for_the_slow_one(runs: Runs) -> None:
    waits = [runs[rank].total("seconds/allreduce_wait", SETTLED) for rank in (0, 1)]
    assert waits[0] > waits[1]
    for run in runs.values():
        for step, seconds in run.scalars["seconds/step"].items():
            assert 0.0 <= run.scalars["seconds/allreduce_wait"][step] <= seconds * 1.01 + 1e-3
