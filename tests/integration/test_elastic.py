"""Ranks are lost and hosts come and go under a running ``horovodrun``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.integration.gates import GatedRun
from tests.integration.test_kill_and_resume import SLOW, assert_each_sample_once
from tests.support.jobs import PATIENCE, durable, elastic, kill

SIZES = {1: 3, 2: 1}  # of the world, for `change_hosts`
NEVER = 99  # ranks

pytestmark = pytest.mark.acceptance


def kill_one_rank(run: GatedRun, rank: int, start: Start, hosts: Path) -> None:
    """Kill a rank of two; the other one resumes from memory, and no sample is lost or done twice.

    The run has a gate some commits later.
    """
    job = start(run, elastic(hosts))
    batch = run.wait_for(job, lambda batch: batch.epoch == 1 and batch.size == 2 and batch.commit >= 12)
    survivor = run.process_of(1 - rank)
    kill(run.process_of(rank))
    run.open()
    after = run.wait_for(job, lambda other: other.generation > batch.generation)
    run.finish(job)
    assert (after.pid, after.size) == (survivor, 1)
    # Nothing older than the last commit, which may have come after the last batch that was begun.
    last = max(batch.commit for batch in run.batches() if batch.generation == 1)
    assert run.generations()[2] in (last, last + 1)
    assert "memory" in run.log
    assert_each_sample_once(run, padding=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_rank_continues_when_one_is_killed(
    rank: int, start: Start, hosts: Path, tmp_path: Path
) -> None:
    kill_one_rank(GatedRun(tmp_path / "run", 3, *SLOW, gates=[20]), rank, start, hosts)


def change_hosts(run: GatedRun, start: Start, hosts: Path) -> None:
    """Add a worker to two, then take these two away; not a step is lost. The run waits for `SIZES`."""
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
    assert len(run.committed()) == len(run.batches())  # no batch was thrown away
    assert_each_sample_once(run, padding=2)


def test_a_host_that_joins_and_one_that_leaves_cost_no_step(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    change_hosts(GatedRun(tmp_path / "run", 3, "--step-seconds", "0.05", sizes=SIZES), start, hosts)


def test_all_hosts_replaced_at_once_the_durable_commit_carries_the_job_over(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    hosts.write_text("localhost:1\n")
    run = GatedRun(tmp_path / "run", 3, *SLOW, sizes={1: NEVER})
    job = start(run, elastic(hosts, workers=1))
    run.wait_for(job, lambda batch: batch.commit >= 8 and durable(run.root) >= 8)
    hosts.write_text("127.0.0.1:1\n")
    job.wait(PATIENCE)  # Horovod gives up
    job.kill()
    run.sizes.clear()
    run.finish(start(run, elastic(hosts, workers=1)))
    assert run.generations()[max(run.generations())] >= 8
    assert_each_sample_once(run, padding=1)
