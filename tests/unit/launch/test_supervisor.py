"""The supervisor between two guardians or signals; `tests.simulation` runs whole supervisors."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import config
from hvdrecover.events import read
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.link import ConnectedGuardian, Guardians
from hvdrecover.launch.supervisor import JobState, Supervisor
from tests.fakes.clock import FakeClock


def make(command: list[str], folder: Path, processes: int = 1, **options: Any) -> Supervisor:
    settings = replace(config.read({}), events=folder)
    return Supervisor(command, Options(processes), {}, settings, **options)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """The real one, as it is while a start of the job is under way."""
    made = make(["train"], tmp_path)
    selector = selectors.DefaultSelector()
    made._guardians = Guardians(selector, made._hear, made._lost, made._greeting)
    yield made
    made._guardians.close()


def test_a_signal_after_the_job_leaves_by_a_plan_is_the_first_one(supervisor: Supervisor) -> None:
    """As Slurm sends one when the time is over, long after the job has begun to leave by itself."""
    supervisor._state = JobState.LEAVING
    supervisor._handle_signal(signal.SIGTERM)
    assert supervisor._state is JobState.LEAVING
    supervisor._handle_signal(signal.SIGTERM)
    assert (supervisor._state, supervisor._code) == (JobState.STOPPED, config.PREEMPTED)


def test_events_of_a_guardian_keep_their_order_though_one_was_read_late(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor._clock = FakeClock()
    guardian, event = ConnectedGuardian("h1", 0), {"kind": "fault", "host": "h1", "rank": 0, "pid": 7}
    for name, age in (("crash", 0.1), ("early_exit", 0.2)):  # the second reads as the older one
        supervisor._hear(guardian, {"kind": "event", "event": {**event, "fault": name}, "age": age})
    supervisor._record.flush()
    assert [event.facts["fault"] for event in read(tmp_path)] == ["crash", "early_exit"]


def test_credentials_in_the_command_are_not_written_down(tmp_path: Path) -> None:
    command = ["train", "sftp://me:hunter2@store/run"]
    made = make(command, tmp_path)
    assert made._redacted == made._supervised.command == ["train", "sftp://store/run"]
    assert made._command == command
