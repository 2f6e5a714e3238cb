"""The way of events from a guardian, and its training process, to the supervisor or the record."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import config
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.launch.reports import Reports
from hvdrecover.launch.training import Training
from tests.unit.launch.children import environment
from tests.unit.launch.supervising import Supervisor

EMITS_AND_DIES = """
import os, signal
from hvdrecover.config import read
from hvdrecover.events import Events, Pipe
log = Events(Pipe(read().slot[3]).add, "h")
for number in range(100):
    log.emit("commit", commit=number)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def reports(folder: Path, **facts: Any) -> Reports:
    settings = dataclasses.replace(config.read({"HOROVOD_LOCAL_RANK": "0"}), events=folder, **facts)
    return Reports(settings, SYSTEM_CLOCK)


def killed() -> Training:
    """A training process that has emitted events and was killed at once."""
    training = Training([sys.executable, "-c", EMITS_AND_DIES], environment())
    training.process.wait(60)
    return training


def test_events_of_a_killed_process_reach_the_supervisor_with_their_age(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    guardian = reports(tmp_path, supervisor=supervisor.address)
    training = killed()
    guardian.forward(training)
    training.close()
    guardian.events.emit("standby", slot=0, ready=True)
    supervisor.serve(lambda: len(supervisor.heard) == 101, "all events")
    heard = [message for _, _, message in supervisor.heard]
    assert [each["event"]["commit"] for each in heard[:100]] == list(range(100))
    assert heard[100]["event"]["kind"] == "standby"
    ages = [each["age"] for each in heard]
    assert all(0 <= age < 60 for age in ages)
    assert list(tmp_path.iterdir()) == []  # the supervisor writes
