"""The time that a supervisor waits for other ranks when a script has failed before the job's first commit."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from hvdrecover import config
from hvdrecover.launch import waits
from hvdrecover.launch.guardians import Guardian
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.link import Message
from hvdrecover.launch.restarts import Attempt, Outcome
from hvdrecover.launch.supervisor import Settings, Supervisor
from tests.fakes.clock import FakeClock
from tests.unit.launch.supervising import FAULT

FIRST, SECOND = Guardian("h1", 0), Guardian("h2", 0)
ERROR: Message = {**FAULT, "fault": "script_error", "end": "first_error", "exit": 1, "final": True}
BEGUN: Message = {"kind": "commit", "commit": [0, 0], "begun": True}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def supervisor(clock: FakeClock, tmp_path: Path) -> Supervisor:
    """One of two ranks, of which one has failed."""
    made = Supervisor(["train"], Settings(Options(2), (), {}, tmp_path), config.read({}), clock=clock)
    made._attempts = [Attempt(1)]
    made._hear(FIRST, ERROR)
    assert not made._is_over()
    return made


def patience(supervisor: Supervisor, clock: FakeClock) -> float:
    """Return for how many seconds from now the start lasts."""
    began = clock.seconds
    while not supervisor._is_over():
        clock.advance(0.5)
    return clock.seconds - began


def test_a_closed_terminal_does_not_change_how_the_job_ends(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    closed = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    with pytest.raises(BrokenPipeError):
        closed.write("x")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        supervisor._say_end(Outcome("end", 75, "stopped", traceback="Traceback …"))
    closed.detach()


def test_it_waits_for_no_rank_when_all_have_failed(supervisor: Supervisor, clock: FakeClock) -> None:
    supervisor._hear(SECOND, ERROR)
    assert patience(supervisor, clock) == 0.0


def test_a_rank_that_has_begun_is_to_fail_soon(supervisor: Supervisor, clock: FakeClock) -> None:
    supervisor._hear(SECOND, BEGUN)
    assert patience(supervisor, clock) == waits.OTHER_ERRORS


def test_one_that_begins_late_is_waited_for_from_then_on(supervisor: Supervisor, clock: FakeClock) -> None:
    clock.advance(waits.IMPORTS / 2)
    assert not supervisor._is_over()
    supervisor._hear(SECOND, {**BEGUN, "begun": False})
    assert not supervisor._is_over()
    supervisor._hear(SECOND, BEGUN)
    assert patience(supervisor, clock) == waits.OTHER_ERRORS
