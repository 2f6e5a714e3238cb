"""One checkpoint root, any launcher, any number of workers."""

from __future__ import annotations

from pathlib import Path

from hvdrecover.examples.digits_run import DigitsRun, elastic, mpi, mpirun, static
from tests.integration.conftest import Start
from tests.integration.gates import GatedRun
from tests.integration.test_kill_and_resume import SLOW, assert_each_sample_once, durable


def test_each_launcher_continues_from_where_the_one_before_was_killed(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    run = GatedRun(tmp_path / "run", 4, *SLOW, gates=[6, 12, 18, 24])  # one for each start
    launchers = [
        ("plain", [], 1),
        ("mpirun", mpirun(2), 2),
        ("static", static(3), 3),
        ("elastic", elastic(hosts), 2),
    ]
    for _, launcher, workers in launchers:
        job = start(run, launcher)
        begun = max((batch.time for batch in run.batches()), default=0.0)
        first = run.wait_for(job, lambda batch, begun=begun: batch.time > begun)
        assert first.size == workers
        run.wait_for(
            job,
            lambda batch, first=first: batch.commit >= first.commit + 3 and durable(run.root) > first.commit,
        )
        job.kill()
        run.open()
    run.finish(start(run, mpi(2)))
    starts = [commit for _, commit in sorted(run.generations().items())]
    assert starts[0] == 0 and starts == sorted(set(starts))
    assert_each_sample_once(run, padding=2)
    assert run.accuracy() > 0.7


def test_a_single_process_needs_no_launcher_and_no_variables(start: Start, tmp_path: Path) -> None:
    run = DigitsRun(tmp_path / "run", 1)
    run.finish(start(run))
    assert_each_sample_once(run, padding=0)
