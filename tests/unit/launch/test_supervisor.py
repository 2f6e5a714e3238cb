"""The real supervisor: messages that are malformed or long, signals, errors at the start of the script."""

from __future__ import annotations

import io
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import config
from hvdrecover.launch import link, processes, waits
from hvdrecover.launch.guardians import Guardian, Guardians
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.link import Message
from hvdrecover.launch.restarts import Attempt, Outcome
from hvdrecover.launch.supervisor import Settings, State, Supervisor
from hvdrecover.record import Record, read
from tests.fakes.clock import FakeClock
from tests.unit.launch.children import environment, until
from tests.unit.launch.supervising import FAULT

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """The real one, as it is while a start of the job is under way."""
    made = Supervisor(["train"], Settings(Options(1), (), {}, tmp_path), config.read({}))
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
    supervisor._state = State.LEAVING
    supervisor._handle_signal(signal.SIGTERM)
    assert supervisor._state is State.LEAVING
    supervisor._handle_signal(signal.SIGTERM)
    assert (supervisor._state, supervisor._code) == (State.STOPPED, config.PREEMPTED)


def test_events_of_a_guardian_keep_their_order_though_one_was_read_late(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor._record, supervisor._clock = Record(tmp_path), FakeClock()
    guardian, event = Guardian("h1", 0), {"kind": "fault", "host": "h1", "rank": 0, "pid": 7}
    for name, age in (("crash", 0.1), ("early_exit", 0.2)):  # the second reads as the older one
        supervisor._hear(guardian, {"kind": "event", "event": {**event, "fault": name}, "age": age})
    supervisor._record.flush()
    assert [event.facts["fault"] for event in read(tmp_path)] == ["crash", "early_exit"]


def test_credentials_in_the_command_are_not_written_down(tmp_path: Path) -> None:
    command = ["train", "sftp://me:hunter2@store/run"]
    made = Supervisor(command, Settings(Options(1), (), {}, tmp_path), config.read({}))
    assert made._started["command"] == list(made._supervised().command) == ["train", "sftp://store/run"]
    assert made._command == command


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b'{"kind": "fault", "point": 3}',
        b'{"kind": "where", "rank": "x"}',
        b'{"kind": "stalled", "missing": {"x": []}, "seconds": 1}',
        b'{"kind": "event"}',
        b"[" * 900 + b"]" * 900,
    ],
)
def test_a_malformed_message_of_a_guardian_does_not_end_the_supervisor(
    supervisor: Supervisor, line: bytes
) -> None:
    with come(supervisor) as connection:
        connection.sendall(b"\n".join([line, b'{"kind": "end", "how": "left"}', b""]))
        until(lambda: serve(supervisor) or supervisor._attempts[-1].ends, "the next message")
        assert supervisor._attempts[-1].ends == ["left"]


def test_a_traceback_of_megabytes_arrives(supervisor: Supervisor) -> None:
    text = "x" * (3 << 20)
    host, _, rest = supervisor._guardians.address("127.0.0.1").rpartition("/")
    port, _, token = rest.partition(":")
    guardian = link.connect(host, int(port), token, name="h1", slot=0)
    assert guardian is not None
    sender = threading.Thread(target=lambda: guardian.send(**FAULT, traceback=f"{text}\nValueError"))
    sender.start()

    def heard() -> list[dict[str, Any]]:
        serve(supervisor)
        return supervisor._attempts[-1].faults

    (fault,) = until(heard, "the fault")
    assert fault["traceback"] == f"{text}\nValueError"
    sender.join()
    assert len(supervisor._guardians) == 1
    guardian.release()


# -- errors before the job's first commit: the wait for other ranks ------------------------------------

FIRST, SECOND = Guardian("h1", 0), Guardian("h2", 0)
ERROR: Message = {**FAULT, "fault": "script_error", "end": "first_error", "exit": 1, "final": True}
BEGUN: Message = {"kind": "commit", "commit": [0, 0], "begun": True}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def starting(clock: FakeClock, tmp_path: Path) -> Supervisor:
    """One of two ranks, of which one has failed."""
    made = Supervisor(["train"], Settings(Options(2), (), {}, tmp_path), config.read({}), clock=clock)
    made._attempts = [Attempt(1)]
    made._hear(FIRST, ERROR)
    assert not made._is_over()
    return made


def patience(starting: Supervisor, clock: FakeClock) -> float:
    """Return for how many seconds from now the start lasts."""
    began = clock.seconds
    while not starting._is_over():
        clock.advance(0.5)
    return clock.seconds - began


def test_a_closed_terminal_does_not_change_how_the_job_ends(
    starting: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    closed = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    with pytest.raises(BrokenPipeError):
        closed.write("x")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        starting._say_end(Outcome("end", 75, "stopped", traceback="Traceback …"))
    closed.detach()


def test_it_waits_for_no_rank_when_all_have_failed(starting: Supervisor, clock: FakeClock) -> None:
    starting._hear(SECOND, ERROR)
    assert patience(starting, clock) == 0.0


def test_a_rank_that_has_begun_is_to_fail_soon(starting: Supervisor, clock: FakeClock) -> None:
    starting._hear(SECOND, BEGUN)
    assert patience(starting, clock) == waits.OTHER_ERRORS


def test_one_that_begins_late_is_waited_for_from_then_on(starting: Supervisor, clock: FakeClock) -> None:
    clock.advance(waits.IMPORTS / 2)
    assert not starting._is_over()
    starting._hear(SECOND, {**BEGUN, "begun": False})
    assert not starting._is_over()
    starting._hear(SECOND, BEGUN)
    assert patience(starting, clock) == waits.OTHER_ERRORS


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
