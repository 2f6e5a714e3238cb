"""The whole job is killed; started again, it ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.conftest import LONG, Finished, Start
from tests.support.commands import wait_until
from tests.support.faulty_run import (
    FaultyRun,
    a_long_run,
    assert_each_sample_once,
    assert_same_weights,
    kill_in_epoch,
)
from tests.support.jobs import PATIENCE, DigitsRun, elastic, static, supervised

EPOCHS = 3
ADAMW = ("torch", "--optimizer", "adamw")

pytestmark = pytest.mark.acceptance


@pytest.fixture
def clean(request: pytest.FixtureRequest, finished: Finished) -> DigitsRun:
    """A finished run of two workers that nothing happened to; by default of torch with AdamW."""
    framework, *options = getattr(request, "param", ADAMW)
    return finished(EPOCHS, framework, *options)


def like(clean: DigitsRun, folder: Path, *options: str, gates: list[int]) -> FaultyRun:
    return a_long_run(folder, *clean.options, *options, framework=clean.framework, gates=gates)


@LONG
def test_a_finished_run_that_is_reopened_has_more_epochs(start: Start, tmp_path: Path) -> None:
    run = DigitsRun(tmp_path, 1)
    run.finish(start(run, static(2)))
    trained = run.batches()
    longer = DigitsRun(tmp_path, 3)
    longer.finish(start(longer, static(2)))
    assert longer.batches() == trained  # it was finished, and says how to continue it
    assert "start it by `hvdrecover run --reopen`" in longer.log
    longer.finish(start(longer, supervised("--no-standby", "--reopen")))
    assert {batch.epoch for batch in longer.batches()[len(trained) :]} == {1, 2}
    assert_each_sample_once(longer, padding=1)


# The next test has AdamW with torch; `test_resume` a loop of TensorFlow's, `test_keras_callbacks` a `fit`.
@pytest.mark.parametrize(
    "clean",
    [
        pytest.param(("torch", "--optimizer", "sgd"), marks=LONG),
        pytest.param(("tensorflow", "--fit", "--optimizer", "sgd"), marks=LONG),
        pytest.param(("tensorflow", "--optimizer", "adam"), marks=LONG),
    ],
    indirect=True,
    ids="-".join,
)
def test_resumed_in_mid_epoch_it_is_bitwise_equal(clean: DigitsRun, start: Start, tmp_path: Path) -> None:
    run = like(clean, tmp_path, gates=[16])
    kill_in_epoch(run, start(run, static(2)), epoch=1, commits=3)
    assert not run.weights.exists()
    run.finish(start(run, static(2)))
    last = max(batch.commit for batch in run.batches() if batch.generation == 1)
    begun = min(batch.commit for batch in run.batches() if batch.epoch == 1)
    assert begun < run.generations()[2] <= last + 1  # inside the epoch
    assert "resumed from commit" in run.log
    assert_same_weights(run, clean)
    assert_each_sample_once(run, padding=1)


def test_resumed_twice_with_prefetching_loaders_it_is_bitwise_equal(
    clean: DigitsRun, start: Start, tmp_path: Path
) -> None:
    run = like(clean, tmp_path, "--loader-workers", "1", gates=[7, 24])
    kill_in_epoch(run, start(run, static(2)), epoch=0, commits=2)
    kill_in_epoch(run, start(run, static(2)), epoch=2, commits=1)
    assert not run.weights.exists()
    run.finish(start(run, static(2)))
    assert set(run.generations()) == {1, 2, 3}
    begun = min(batch.commit for batch in run.batches() if batch.epoch == 2)
    assert begun < run.generations()[3]  # inside the epoch
    assert_same_weights(run, clean)
    assert_each_sample_once(run, padding=1)


def test_ctrl_c_leaves_nothing_that_a_later_start_trips_over(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    run = a_long_run(tmp_path / "run", gates=[12])
    job = start(run, elastic(hosts))
    run.wait_for(job, lambda batch: batch.commit >= 4)
    for process in job.processes():  # a terminal sends SIGINT to all of the foreground
        with suppress(ProcessLookupError):  # who looks for hosts comes and goes
            os.kill(process, signal.SIGINT)
    job.wait(PATIENCE)
    wait_until(lambda: job.processes() == [])  # workers were told as well, and may end after their launcher
    run.open()
    run.finish(start(run, elastic(hosts)))
    assert_each_sample_once(run, padding=1)
