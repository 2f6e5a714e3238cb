"""Guardians under MPI, on a lost host, and asked for stacks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.conftest import LONG, WHOLE, Start
from tests.support.commands import wait_until
from tests.support.faulty_run import (
    HOLD,
    SECRET,
    SLOW,
    a_run,
    assert_each_sample_once,
    assert_private,
    wait_for_durable,
)
from tests.support.jobs import PATIENCE, STANDBY, DigitsRun, kill, parent, running, supervised

pytestmark = pytest.mark.acceptance


def test_with_mpi_a_lost_rank_restarts_the_job(start: Start, tmp_path: Path) -> None:
    run = a_run(tmp_path, HOLD)
    environ = {"AWS_SECRET_ACCESS_KEY": SECRET}
    job = run.begin(start, "--mpi", "--mpi-args=--oversubscribe", environ=environ)
    wait_for_durable(run, job, 4)
    assert_private(job)
    kill(run.process_of(1))
    run.open()
    assert job.wait(400) == 0, job.tail()
    assert len(run.events("start")) == 2
    assert run.sources() == {1: "initial", 2: "near"}
    assert_each_sample_once(run, padding=1)
    assert job.processes() == []


@LONG
def test_a_job_waits_for_a_lost_host_unless_it_may_shrink(start: Start, tmp_path: Path) -> None:
    run = a_run(tmp_path, HOLD)
    two = ("-H", "localhost:1,127.0.0.1:1", "--blacklist-cooldown-range", "15", "16")
    job = run.begin(start, *two)
    wait_for_durable(run, job, 4)
    lost = parent(run.process_of(1))
    kill(lost)
    run.open()
    run.finish(job)
    assert "1 of 2 processes are left; the job waits until 2 run again" in run.log
    assert "With --min-np 1 it would resume with what is left" in run.log
    assert {batch.size for batch in run.batches()} == {2}
    assert len(run.events("start")) == 1
    assert set(run.sources().values()) == {"initial", "memory"}
    assert_each_sample_once(run, padding=1)


def test_sigquit_has_all_ranks_say_where_they_are_and_a_standby_that_does_not_wake_is_replaced(
    start: Start, tmp_path: Path
) -> None:
    run = a_run(tmp_path, HOLD)
    job = run.begin(start, standby=True, environ={"AWS_SECRET_ACCESS_KEY": SECRET})
    run.wait_for(job, lambda batch: batch.commit >= 4)
    assert_private(job)
    os.kill(job.pid, signal.SIGQUIT)
    wait_until(lambda: {event["rank"] for event in run.events("stacks")} == {0, 1})
    assert run.events("fault") == []

    training = run.process_of(1)
    guardian = parent(training)
    wait_until(lambda: {event["pid"] for event in run.events("standby")} >= {guardian})
    (standby,) = [each for each in running(job, *STANDBY) if parent(each) == guardian]
    os.kill(standby, signal.SIGSTOP)
    kill(training)
    run.open()
    run.finish(job)  # what is printed comes through horovodrun, later than the event
    for event in run.events("stacks"):
        assert "most recent call first" in Path(event["file"]).read_text()
        assert f"rank {event['rank']} on localhost is at {event['summary']}" in run.log
    assert [event["fault"] for event in run.events("fault")] == ["crash"]
    assert [event["warm"] for event in run.events("restart")] == [True, False]
    assert run.sources() == {1: "initial", 2: "memory"}
    assert_each_sample_once(run, padding=1)


def test_a_waiting_standby_holds_neither_sockets_nor_loops_that_wake(start: Start, tmp_path: Path) -> None:
    run = DigitsRun(tmp_path / "run", 10_000, *SLOW)
    job = start(run, supervised(workers=1), WHOLE)

    def waiting() -> list[int]:
        standbys = running(job, *STANDBY)
        return [each for each in standbys if "pipe" in Path(f"/proc/{each}/wchan").read_text()]

    wait_until(lambda: len(waiting()) == 1)
    (standby,) = waiting()
    links = [str(each.readlink()) for each in Path(f"/proc/{standby}/fd").iterdir()]
    assert [link for link in links if "socket" in link or "eventpoll" in link] == []
    assert "libtorch" in Path(f"/proc/{standby}/maps").read_text()
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(PATIENCE) == 130
