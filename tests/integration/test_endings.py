"""The ends of jobs under ``hvdrecover run``: preemption, lost launchers, bugs, lack of memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.conftest import LONG, TENSORFLOW_IF_LONG, Finished, Start
from tests.support.commands import call, wait_until
from tests.support.faulty_run import (
    EPOCHS,
    HOLD,
    PATIENT,
    FaultyRun,
    a_run,
    assert_each_sample_once,
    assert_same_weights,
    wait_for_durable,
)
from tests.support.jobs import DRIVER, PATIENCE, PREEMPTED, failing_hosts, kill, running, wait_until_in_memory

pytestmark = pytest.mark.acceptance


def resume(run: FaultyRun, start: Start) -> None:
    """Start it again, and see it end as if nothing had happened."""
    job = run.begin(start)
    assert job.wait(400) == 0, job.tail()
    assert_each_sample_once(run, padding=1)


@pytest.mark.parametrize("framework", TENSORFLOW_IF_LONG)
def test_a_preempted_job_leaves_with_75_and_loses_no_step(
    framework: str, finished: Finished, start: Start, tmp_path: Path
) -> None:
    run = FaultyRun(tmp_path / "run", framework, ["hold step 0 30"])
    job = run.begin(start, *PATIENT)
    run.wait_for(job, lambda batch: batch.commit >= 4)
    events = run.folder / "events"
    status = call("status", events)
    said = dict(line.split(maxsplit=1) for line in status.stdout.splitlines())
    assert (status.returncode, said["state"], said["ranks"]) == (0, "training", "2 of 2")
    assert said["supervisor"].startswith(f"process {job.pid} on ")
    with ThreadPoolExecutor() as threads:
        stopped = threads.submit(call, "stop", events)
        wait_until(lambda: "leaves at its next commit" in run.log or stopped.done())
        run.open()
        assert stopped.result().returncode == 0
    assert job.wait(PATIENCE) == PREEMPTED
    assert job.processes() == []
    assert call("status", events).returncode == 1
    leaving = run.events("leave")
    assert {(event["scope"], event["rank"]) for event in leaving} == {("job", 0), ("job", 1)}
    resume(run, start)
    assert run.generations()[2] == leaving[0]["commit"]
    assert len(run.committed()) == len(run.batches())  # no batch was thrown away
    assert_same_weights(run, finished(EPOCHS, framework))


def test_of_a_job_on_one_host_any_process_can_be_told(start: Start, tmp_path: Path) -> None:
    run = a_run(tmp_path, HOLD)
    job = run.begin(start, *PATIENT)
    run.wait_for(job, lambda batch: batch.commit >= 4)
    os.kill(run.process_of(1), signal.SIGUSR1)
    run.open()
    assert job.wait(PATIENCE) == PREEMPTED
    assert job.processes() == []
    assert len(run.events("start")) == 1
    assert run.events("leave")


def test_without_a_commit_a_second_signal_or_the_end_of_the_grace_ends_it(
    start: Start, tmp_path: Path
) -> None:
    run = a_run(tmp_path, "deadlock step 0 4", "deadlock step 0 8")
    job = run.begin(start, "--grace", "600")
    wait_until(lambda: (tmp_path / "run" / "struck" / "0").exists())
    os.kill(job.pid, signal.SIGTERM)
    wait_until(lambda: "leaves at its next commit" in run.log)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(PATIENCE) == PREEMPTED
    assert job.processes() == []

    job = run.begin(start, "--grace", "2")
    wait_until(lambda: (tmp_path / "run" / "struck" / "1").exists())
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(PATIENCE) == PREEMPTED
    assert job.processes() == []
    assert run.events("leave") == []
    resume(run, start)


def test_ctrl_c_ends_it_without_a_traceback(start: Start, tmp_path: Path) -> None:
    run = a_run(tmp_path, HOLD)
    job = run.begin(start, standby=True)
    run.wait_for(job, lambda batch: batch.commit >= 4)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(PATIENCE) == 130
    assert job.processes() == []
    assert "Traceback" not in run.log


@pytest.mark.parametrize("framework", TENSORFLOW_IF_LONG)
def test_no_process_outlives_its_launcher_and_each_start_resumes_from_memory(
    framework: str, start: Start, tmp_path: Path
) -> None:
    run = a_run(tmp_path, "hold step 0 6", HOLD, framework=framework)
    job = run.begin(start, standby=True)
    wait_until_in_memory(job, run.root, 6)
    workers = set(job.processes()) - {job.pid}
    kill(running(job, *DRIVER)[0])  # the supervisor starts the job again
    wait_until(lambda: not workers & set(job.processes()))
    run.open()
    wait_until_in_memory(job, run.root, 12)
    kill(job.pid)
    wait_until(lambda: job.processes() == [])
    run.open()
    resume(run, start)
    assert "launcher_lost" in {event["fault"] for event in run.events("fault")}
    assert len(run.events("start")) == 3
    assert run.sources() == {1: "initial", 2: "near", 3: "near"}


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup that allows little memory."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base, f"hvdrecover-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(64 << 20))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no memory cgroup can be made here; it takes root")


@LONG
def test_errors_that_do_not_come_back_cost_a_pause_and_are_told_from_each_other(
    start: Start, small_cgroup: Path, tmp_path: Path
) -> None:
    run = a_run(tmp_path, "fail step 1 4", "leave step 1 8", "hunger step 1 12")
    job = run.begin(start, environ={"FAULTS_CGROUP": str(small_cgroup)})
    assert job.wait(400) == 0, job.tail()
    failed, left, hungry = run.events("fault")
    assert (failed["fault"], failed["detail"]) == ("script_error", "RuntimeError: the script is wrong")
    assert (left["fault"], left["exit"]) == ("early_exit", 0)  # a worker that leaves early has failed
    assert (hungry["fault"], hungry["exit"], hungry["rank"]) == ("out_of_memory", -signal.SIGKILL, 1)
    assert "rank 1 on localhost: out of memory (SIGKILL)" in run.log
    assert len(run.events("start")) == 1
    assert_each_sample_once(run, padding=1)


def test_two_starts_that_give_up_restart_the_job(start: Start, tmp_path: Path) -> None:
    """Three deaths without a commit give a slot up; the supervisor then starts the job again."""
    run = a_run(tmp_path, "kill step 1 4", "kill start -1 0", "kill start -1 0")
    job = run.begin(start)
    assert job.wait(400) == 0, job.tail()
    assert [event["scope"] for event in run.events("gave_up")] == ["slot"]
    assert len(run.events("start")) == 2
    assert failing_hosts(run.folder / "events") == {"localhost": 1}
    assert_each_sample_once(run, padding=1)


@LONG
def test_a_launcher_that_does_not_answer_costs_a_start_and_no_commit(start: Start, tmp_path: Path) -> None:
    run = a_run(tmp_path, HOLD)
    job = run.begin(start, "--startup-timeout", "60")
    wait_for_durable(run, job, 4)
    (launcher,) = running(job, *DRIVER)
    os.kill(launcher, signal.SIGSTOP)
    kill(run.process_of(1))
    run.open()
    assert job.wait(400) == 0, job.tail()
    assert "the ranks have not come together" in run.log
    assert len(run.events("start")) == 2
    assert [event["fault"] for event in run.events("fault")][:2] == ["crash", "hang"]
    assert run.sources() == {1: "initial", 2: "near"}
    assert_each_sample_once(run, padding=1)
    assert job.processes() == []
