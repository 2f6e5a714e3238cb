"""A second fault strikes while the first is being repaired, at each stage, on the same rank or another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import LONG, Finished, Start
from tests.support.faulty_run import EPOCHS, FaultyRun, assert_each_sample_once, assert_same_weights

# Pairs: the first fault, and what strikes while it is being repaired.
PAIRS = [
    ("kill step 1 4", "kill reset 0 0"),  # the survivor, before it parts
    ("kill step 1 9", "kill rendezvous 0 0"),  # the survivor, before the rendezvous with the restarted one
    ("kill step 0 14", "kill-soon rendezvous 1 0"),  # the survivor, while it waits at the rendezvous
    ("kill step 1 19", "abort rendezvous 0 0"),  # the survivor, by an exception in Gloo
    ("kill step 1 24", "kill agree 0 0"),  # the survivor, whose memory all would resume from
    ("kill step 1 29", "kill start -1 0"),  # the restarted one, as it starts
    ("kill step 1 34", "kill-late start -1 0"),  # the restarted one, at its rendezvous
    ("kill step 0 39", "kill sync 1 0"),  # the survivor, as it sends its memory to the restarted one
    ("kill step 1 44", "kill agree 1 0"),  # the restarted one, as all agree
    ("kill step 0 47", "kill reset 1 0"),  # all, so that the durable commit is read ...
]
LOAD = "kill load 0 0"  # ... and rank 0 dies of it
# With TensorFlow each recovery takes seconds, for tracing; what differs from torch is how collectives fail.
TENSORFLOWS = (2, 4, 9)

# Seconds, for a machine on which each recovery takes a minute
pytestmark = [LONG, pytest.mark.timeout(1800)]


class RunWithFaultyRepairs(FaultyRun):
    """A run whose faults also strike in the stages of a recovery."""

    script = "repair_faults.py"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_it_recovers_as_from_one_fault(
    framework: str, finished: Finished, start: Start, tmp_path: Path
) -> None:
    pairs = PAIRS if framework == "torch" else [PAIRS[number] for number in TENSORFLOWS]
    faults = [*(fault for pair in pairs for fault in pair), LOAD]
    run = RunWithFaultyRepairs(tmp_path / "run", framework, faults)
    # With the near tier, two stages do not come: nothing has to be sent, and no durable commit to be read.
    job = run.begin(start, standby=True, environ={"HVDRECOVER_NEAR": "off"})
    assert job.wait(1500) == 0, job.tail(60)
    assert len(list((tmp_path / "run" / "struck").iterdir())) == len(faults)
    assert len(run.events("start")) == 1  # the supervisor had nothing to do
    assert_same_weights(run, finished(EPOCHS, framework))
    assert_each_sample_once(run, padding=1)
    assert job.processes() == []


def test_who_hangs_between_a_recovery_and_its_first_commit_is_killed_too(
    start: Start, tmp_path: Path
) -> None:
    # After the job's first commit it is known how long that may take; all processes are new ones here.
    faults = ["kill step 1 4", "kill reset 0 0", "loop step 1 0"]
    run = RunWithFaultyRepairs(tmp_path / "run", "torch", faults, 3)
    job = run.begin(start, "--hang-timeout", "30")
    assert job.wait(400) == 0, job.tail(60)
    assert [event["fault"] for event in run.events("fault")] == ["crash", "crash", "hang"]
    assert_each_sample_once(run, padding=1)
