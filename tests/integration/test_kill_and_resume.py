"""The whole job is killed; started again, it ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import LONG, ONE_OPTIMIZER, Start
from tests.integration.gates import GatedRun
from tests.support.jobs import (
    PATIENCE,
    TRAINING_SAMPLES,
    DigitsRun,
    Job,
    durable,
    elastic,
    static,
    supervised,
)
from tests.waiting import wait_until

SLOW = ("--step-seconds", "0.04")  # so that a kill comes where the test wants it

pytestmark = pytest.mark.acceptance


def assert_same_weights(one: DigitsRun, other: DigitsRun) -> None:
    mine, theirs = torch.load(one.weights), torch.load(other.weights)
    assert list(mine["model"]) == list(theirs["model"])
    for name, tensor in mine["model"].items():
        assert torch.equal(tensor, theirs["model"][name]), name
    for index, entries in mine["optimizer"]["state"].items():
        for name, value in entries.items():
            assert torch.equal(value, theirs["optimizer"]["state"][index][name]), (index, name)
    assert mine["accuracy"] == theirs["accuracy"]


def assert_each_sample_once(run: DigitsRun, *, padding: int) -> None:
    for epoch in range(run.epochs):
        seen = run.samples(epoch)
        assert set(seen) == set(range(TRAINING_SAMPLES))
        assert seen.total() - TRAINING_SAMPLES <= padding


def kill_in_epoch(run: GatedRun, job: Job, epoch: int, commits: int) -> None:
    """Kill all of a job a few commits after an epoch has begun, once a commit of that epoch is durable.

    The run has a gate in that epoch: on a busy machine writes lag behind.
    """
    first = run.wait_for(job, lambda batch: batch.epoch == epoch)
    run.wait_for(
        job, lambda batch: batch.commit >= first.commit + commits and durable(run.root) > first.commit
    )
    job.kill()
    run.open()


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


def test_resumed_in_mid_epoch_it_is_bitwise_equal(
    undisturbed: tuple[str, DigitsRun], start: Start, tmp_path: Path
) -> None:
    optimizer, clean = undisturbed
    run = GatedRun(tmp_path, clean.epochs, "--optimizer", optimizer, *SLOW, gates=[16])
    kill_in_epoch(run, start(run, static(2)), epoch=1, commits=3)
    assert not run.weights.exists()
    run.finish(start(run, static(2)))
    assert 0 < run.generations()[2] < 27
    assert "resumed from commit" in run.log
    assert_same_weights(run, clean)
    assert_each_sample_once(run, padding=1)


@ONE_OPTIMIZER
def test_resumed_twice_with_prefetching_loaders_it_is_bitwise_equal(
    undisturbed: tuple[str, DigitsRun], start: Start, tmp_path: Path
) -> None:
    optimizer, clean = undisturbed
    options = ("--optimizer", optimizer, "--loader-workers", "1", *SLOW)
    run = GatedRun(tmp_path, clean.epochs, *options, gates=[7, 24])
    kill_in_epoch(run, start(run, static(2)), epoch=0, commits=2)
    kill_in_epoch(run, start(run, static(2)), epoch=2, commits=1)
    run.finish(start(run, static(2)))
    assert set(run.generations()) == {1, 2, 3}
    assert_same_weights(run, clean)
    assert_each_sample_once(run, padding=1)


@ONE_OPTIMIZER
def test_a_finished_run_returns_at_once(
    undisturbed: tuple[str, DigitsRun], start: Start, tmp_path: Path
) -> None:
    optimizer, clean = undisturbed
    shutil.copytree(clean.folder, tmp_path / "run")
    run = DigitsRun(tmp_path / "run", clean.epochs, "--optimizer", optimizer)
    before = len(run.batches())
    weights = run.weights.read_bytes()
    run.finish(start(run, static(2)))
    assert "this run was finished" in run.log
    assert len(run.batches()) == before
    assert run.weights.read_bytes() == weights


def test_ctrl_c_leaves_nothing_that_a_later_start_trips_over(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    run = GatedRun(tmp_path / "run", 3, *SLOW, gates=[12])
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
