"""A plain loop with ``state.resume()``: after a fault all processes start again, from the hosts' memory."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gates import GatedRun
from tests.support.jobs import PATIENCE, PREEMPTED, kill, wait_until_in_memory

SCRIPTS = Path(__file__).with_name("scripts")
EACH_SAMPLE_ONCE = sorted(3 * list(range(96)))

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module", params=["torch", "tensorflow"])
def script(request: pytest.FixtureRequest) -> Path:
    return SCRIPTS / f"{request.param}_resume.py"


@pytest.fixture(scope="module")
def expected(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The weights of an undisturbed run."""
    run = GatedRun(script, tmp_path_factory.mktemp("resume") / "undisturbed", "--no-standby")
    run.begin(0, 1, 2)
    yield run.printed("weights")
    run.kill()


@pytest.fixture
def gated(script: Path, tmp_path: Path) -> Iterator[GatedRun]:
    run = GatedRun(script, tmp_path / "disturbed", "--no-standby", "--hang-timeout", "60")
    yield run
    run.kill()


def await_seal(gated: GatedRun, gate: int) -> int:
    """Wait until the host's memory has the commit that was made at a gate, or the one before; return it."""
    job, root = gated.jobs[-1], gated.folder / "root"
    number = int(re.findall(rf"gate {gate} \d+ 0 (\d+)", job.log.read_text())[-1])
    wait_until_in_memory(job, root, number - 1)
    return number


@pytest.mark.parametrize("script", ["torch"], indirect=True)
def test_it_ends_with_the_same_weights_after_a_kill_a_hang_and_a_kill_of_all(
    gated: GatedRun, expected: str
) -> None:
    job = gated.begin()
    hanging = gated.at(0)
    reached = [await_seal(gated, 0)]
    os.kill(hanging[1], signal.SIGSTOP)
    gated.open(0)
    first = gated.at(1)
    reached.append(await_seal(gated, 1))
    kill(first[0])
    gated.open(1)
    second = gated.at(2)
    reached.append(await_seal(gated, 2))
    for process in second.values():
        kill(process)
    gated.open(2)

    assert gated.printed("weights") == expected
    assert json.loads(gated.printed("seen")) == EACH_SAMPLE_ONCE
    log = job.log.read_text()
    begun = [int(number) for number in re.findall(r"begins 0 (\d+) ", log)]
    # At most a step is repeated: the hosts' memory has the newest commit of the lost processes, or the one
    # before, though only each fourth is durable.
    assert begun[0] == 0 and len(begun) == 4
    assert all(gate - 1 <= number <= gate for gate, number in zip(reached, begun[1:], strict=True))
    assert log.count("all ranks start again together") == 3
    assert "Traceback" not in log

    again = gated.begin()
    assert gated.printed("weights") == expected
    assert "this run was finished at commit" in again.log.read_text()


def test_a_killed_and_preempted_job_leaves_at_a_commit_and_a_later_start_continues(
    gated: GatedRun, expected: str
) -> None:
    job = gated.begin()
    kill(gated.at(0)[1])
    gated.open(0)
    gated.at(1)
    os.kill(job.pid, signal.SIGTERM)
    gated.open(1, 2)
    assert job.wait(PATIENCE) == PREEMPTED, job.tail()
    gated.begin()
    assert gated.printed("weights") == expected
    assert json.loads(gated.printed("seen")) == EACH_SAMPLE_ONCE
