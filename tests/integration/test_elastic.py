"""Ranks are lost and hosts come and go under a running ``horovodrun``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.conftest import LONG, Start
from tests.support.faulty_run import a_long_run, assert_each_sample_once, assert_no_step_is_lost
from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, durable, elastic, kill, run_job, supervised

LATE_WORKER = Path(__file__).with_name("scripts") / "late_worker.py"
NEVER = 99  # ranks

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(
    ("framework", "options"),
    [
        ("torch", ()),
        pytest.param("tensorflow", (), marks=LONG),
        pytest.param("tensorflow", ("--fit",), marks=LONG),
    ],
)
def test_the_other_rank_continues_when_rank_0_is_killed(
    framework: str, options: tuple[str, ...], start: Start, hosts: Path, tmp_path: Path
) -> None:
    run = a_long_run(tmp_path / "run", *options, framework=framework, gates=[20])
    job = start(run, elastic(hosts))
    batch = run.wait_for(job, lambda batch: batch.epoch == 1 and batch.size == 2 and batch.commit >= 12)
    survivor = run.process_of(1)

    kill(run.process_of(0))
    run.open()
    after = run.wait_for(job, lambda other: other.generation > batch.generation)
    run.finish(job)

    assert (after.pid, after.size) == (survivor, 1)
    # Nothing older than the last commit, which may have come after the last batch that was begun.
    last = max(batch.commit for batch in run.batches() if batch.generation == 1)
    assert run.generations()[2] in (last, last + 1)
    assert "memory" in run.log
    assert_each_sample_once(run, padding=1)


@pytest.mark.parametrize(
    ("framework", "options", "epochs"),
    [("torch", (), 3), pytest.param("tensorflow", ("--fit",), 4, marks=LONG)],
)
def test_a_host_that_joins_and_one_that_leaves_cost_no_step(
    framework: str, options: tuple[str, ...], epochs: int, start: Start, hosts: Path, tmp_path: Path
) -> None:
    run = a_long_run(tmp_path / "run", *options, epochs=epochs, framework=framework, sizes={1: 3, 2: 1})
    hosts.write_text("localhost:2\n")
    job = start(run, elastic(hosts))
    run.wait_for(job, lambda batch: batch.commit >= 3)

    hosts.write_text("localhost:2\n127.0.0.1:1\n")
    run.wait_for(job, lambda batch: batch.size == 3 and batch.commit >= 10)
    hosts.write_text("127.0.0.1:1\n")
    run.wait_for(job, lambda batch: batch.generation >= 3 and batch.size == 1)
    run.finish(job)

    sizes = [batch.size for batch in run.batches()]
    assert sizes[0] == 2 and 3 in sizes and sizes[-1] == 1
    assert_no_step_is_lost(run)
    assert_each_sample_once(run, padding=2)


def test_all_hosts_replaced_at_once_the_durable_commit_carries_the_job_over(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    hosts.write_text("localhost:1\n")
    run = a_long_run(tmp_path / "run", sizes={1: NEVER})
    job = start(run, elastic(hosts, workers=1))
    run.wait_for(job, lambda batch: batch.commit >= 8 and durable(run.root) >= 8)
    hosts.write_text("127.0.0.1:1\n")
    job.wait(PATIENCE)  # Horovod gives up
    job.kill()
    run.sizes.clear()
    run.finish(start(run, elastic(hosts, workers=1)))
    assert run.generations()[max(run.generations())] >= 8
    assert_each_sample_once(run, padding=1)


def starts(folder: Path, hosts: Path, launcher: Sequence[str], workers: int, lost: bool = False) -> list[int]:
    """Run a job to which a worker comes late; return the number of processes that started as each rank."""
    hosts.write_text(f"localhost:{workers}\n")
    command = [*launcher, sys.executable, str(LATE_WORKER), str(folder)]
    settings = {"HOSTS": str(hosts), "LOST": str(int(lost)), "HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}
    log = run_job(command, folder / "log", {**ROOT_MAY_USE_MPI, **settings})
    assert (folder / "came").exists()
    assert (folder / "sizes").read_text().split() == [str(workers), str(workers + 1)], log
    return [len((folder / str(rank)).read_text().split()) for rank in range(workers + 1)]


def test_the_others_wait_for_a_worker_that_comes_late(tmp_path: Path, hosts: Path) -> None:
    assert starts(tmp_path, hosts, elastic(hosts, 1), 1) == [1, 1]


@LONG
def test_a_late_worker_takes_its_place_though_another_is_lost_meanwhile(tmp_path: Path, hosts: Path) -> None:
    launcher = supervised("--no-standby", "--min-np", "1", "--discover", f"file {hosts}", workers=2)
    assert starts(tmp_path, hosts, launcher, 2, lost=True) == [1, 2, 1]
