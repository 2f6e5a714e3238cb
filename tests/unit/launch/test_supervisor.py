"""The real supervisor: messages that are malformed or long, signals, errors at the start of the script."""

from __future__ import annotations

import io
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import config
from hvdrecover.launch import processes
from hvdrecover.launch.guardians import ConnectedGuardian, Guardians
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.restarts import Attempt, Outcome
from hvdrecover.launch.supervisor import JobState, Supervisor
from hvdrecover.record import read
from tests.fakes.clock import FakeClock
from tests.unit.launch.children import environment, until
from tests.unit.launch.supervising import FAULT

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def make(command: list[str], folder: Path, processes: int = 1, **options: Any) -> Supervisor:
    settings = replace(config.read({}), events=folder)
    return Supervisor(command, Options(processes), {}, settings, **options)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """The real one, as it is while a start of the job is under way."""
    made = make(["train"], tmp_path)
    made._selector = selectors.DefaultSelector()  # type: ignore[attr-defined]
    made._guardians = Guardians(made._selector, made._hear, made._lost, made._greeting)  # type: ignore[attr-defined]
    made._attempts = [Attempt(1), Attempt(2)]
    made._driver = processes.start(SLEEP, environment())
    yield made
    made._guardians.close()
    made._driver.kill()
    made._driver.wait()


def come(supervisor: Supervisor) -> socket.socket:
    """A connection that has said the token."""
    host, _, rest = supervisor._guardians.address("127.0.0.1").rpartition("/")
    port, _, token = rest.partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(json.dumps({"token": token, "name": "h1", "slot": 0}).encode() + b"\n")
    return connection


def serve(supervisor: Supervisor) -> None:
    """One turn of its loop, without its signals."""
    for key, _ in supervisor._selector.select(0.01):  # type: ignore[attr-defined]
        key.data()


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
    assert made._redacted == list(made._supervised().command) == ["train", "sftp://store/run"]
    assert made._command == command


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


def test_ranks_outside_a_training_function_start_again_together_and_end_together(
    supervisor: Supervisor,
) -> None:
    with come(supervisor) as connection:
        until(lambda: serve(supervisor) or len(supervisor._guardians), "the guardian")
        died = {**FAULT, "commit": [0, 0], "point": [0, 0], "round": 0, "begun": True, "age": 9.0}
        connection.sendall(json.dumps(died).encode() + b"\n")
        until(lambda: serve(supervisor) or supervisor._attempts[-1].faults, "the fault")
        assert not supervisor._is_over()
        assert (supervisor._attempts[-1].rounds, supervisor._streak.restarts) == (1, 1)

        # One of another rank's process, which had died with the first.
        connection.sendall(json.dumps(died).encode() + b"\n")
        until(lambda: serve(supervisor) or len(supervisor._attempts[-1].faults) == 2, "the second fault")
        assert not supervisor._is_over()

        done = {**died, "kind": "done", "exit": 0, "round": 1, "stops": False}
        connection.sendall(json.dumps(done).encode() + b"\n")
        until(lambda: serve(supervisor) or supervisor._attempts[-1].exits, "the end")
        assert not supervisor._is_over()
        orders = [json.loads(line)["order"] for line in connection.recv(4096).splitlines()]
    assert orders == ["know", "restart", "exit"]
