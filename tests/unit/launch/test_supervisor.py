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
from hvdrecover.launch.ends import Attempt
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.link import ConnectedGuardian, Guardians
from hvdrecover.launch.supervisor import JobState, Supervisor
from tests.fakes.clock import FakeClock


def make(command: list[str], folder: Path, processes: int = 1, **options: Any) -> Supervisor:
    settings = replace(config.read({}), events=folder)
    return Supervisor(command, Options(processes, **options), {}, settings)


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


def test_the_signal_that_is_announced_is_one_that_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", {signal.SIGTERM: signal.SIG_IGN}.get)
    assert make(["train"], tmp_path)._supervised.stop_signal == "SIGUSR1"


def test_a_process_that_ends_on_notice_is_not_blamed_for_its_exit_code(supervisor: Supervisor) -> None:
    supervisor._attempts.append(Attempt(1))
    facts = {"kind": "done", "exit": 0, "fault": "early_exit", "commit": (0, 0), "round": 0}
    for stops in True, False:
        supervisor._hear(ConnectedGuardian("h1", 0), {**facts, "stops": stops})
        assert bool(supervisor._attempts[0].exits) is not stops


def test_a_job_that_starts_again_does_with_the_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, least = make(["train"], tmp_path, 2, least=1), []

    def attempt(arguments: list[str], path: str) -> None:
        made._attempts.append(Attempt(1, 1))
        assert "printf 'localhost:2\\n'" in arguments  # the slots stay
        least.append(arguments[arguments.index("-np") + 1])
        made._state = JobState.STOPPED if len(least) > 1 else JobState.TRAINING

    monkeypatch.setattr(made, "_attempt", attempt)
    monkeypatch.setattr(made, "_pause", lambda seconds: None)
    assert made._keep_going(made._arguments(made._options), "").reason == "stopped"
    assert least == ["2", "1"]


def test_credentials_in_the_command_are_not_written_down(tmp_path: Path) -> None:
    command = ["train", "sftp://me:hunter2@store/run"]
    made = make(command, tmp_path)
    assert made._redacted == made._supervised.command == ["train", "sftp://store/run"]
    assert made._command == command
