"""Messages of every shape, to the real supervisor and to a real guardian."""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hvdrecover import config
from hvdrecover.launch import link, messages, processes, restarts
from hvdrecover.launch.guardian import Guardian
from hvdrecover.launch.guardian import Settings as GuardianSettings
from hvdrecover.launch.guardians import Guardians
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.link import Link
from hvdrecover.launch.messages import Message
from hvdrecover.launch.restarts import Attempt
from hvdrecover.launch.supervisor import Settings, Supervisor
from hvdrecover.launch.training import Training
from tests.unit.launch.children import environment, until
from tests.unit.launch.test_guardians import FAULT

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]

# Wrong, right and nearly right values, under names that mean something and others.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["fault", "crash", "script_error", "apart", "finished", "1", "-1", "leave", "where"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
PAIRS = st.lists(st.integers(-1, 2**70) | VALUES, min_size=1, max_size=3)
FIELDS = dict.fromkeys(sorted({*messages._REPORTED, *messages._ORDERED}), VALUES) | {
    "commit": PAIRS | VALUES,
    "point": PAIRS | VALUES,
    "missing": st.dictionaries(st.sampled_from(["0", "1", "²", "x", "9" * 40]), VALUES) | VALUES,
}


def told(name: str, kinds: dict[str, tuple[str, ...]]) -> st.SearchStrategy[Message]:
    """Messages of these kinds, in which fields are left out, or hold anything."""
    kind = st.sampled_from(sorted(kinds)) | VALUES
    return st.fixed_dictionaries({name: kind}, optional=FIELDS)


def nearly(right: Message) -> st.SearchStrategy[Message]:
    """A right message with one field that holds anything."""
    return st.tuples(st.sampled_from(sorted(right)), VALUES).map(lambda one: {**right, one[0]: one[1]})


LINES = st.one_of(
    told("kind", messages._KINDS).map(json.dumps).map(str.encode),
    nearly({**FAULT, "final": True, "again": True, "end": "crash", "loaded": None, "root": "/data"})
    .map(json.dumps)
    .map(str.encode),
    nearly({"kind": "stalled", "missing": {"1": ["a"]}, "seconds": 3.0}).map(json.dumps).map(str.encode),
    nearly({"kind": "where", "rank": 1, "place": None}).map(json.dumps).map(str.encode),
    VALUES.map(json.dumps).map(str.encode),
    st.binary(max_size=50),
    st.sampled_from([b"[" * 900 + b"]" * 900, b'{"kind": ' + b"[" * 900 + b"]" * 900 + b"}", b"9" * 5000]),
)


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
    if supervisor._stall is not None:
        supervisor._report_stall(supervisor._stall)
    supervisor._is_over()
    restarts.outcome(supervisor._attempts, 0, ranks=1, stopping=False, max_restarts=1)


def test_a_signal_after_the_job_leaves_by_a_plan_is_the_first_one(supervisor: Supervisor) -> None:
    """As Slurm sends one when the time is over, long after the job has begun to leave by itself."""
    supervisor._leaving = True
    supervisor._heed(signal.SIGTERM)
    assert supervisor._stopped is None
    supervisor._heed(signal.SIGTERM)
    assert supervisor._stopped == config.PREEMPTED


def test_credentials_in_the_command_are_not_written_down(tmp_path: Path) -> None:
    command = ["train", "sftp://me:hunter2@store/run"]
    made = Supervisor(command, Settings(Options(1), (), {}, tmp_path), config.read({}))
    assert made._started["command"] == list(made._supervised().command) == ["train", "sftp://store/run"]
    assert made._command == command


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(LINES, min_size=1, max_size=12))
def test_whatever_is_sent_the_supervisor_continues(supervisor: Supervisor, lines: list[bytes]) -> None:
    supervisor._attempts = [Attempt(1), Attempt(2)]
    with come(supervisor) as connection:
        connection.sendall(b"\n".join([*lines, b'{"kind": "end", "how": "heard to the end"}', b""]))

        def heard() -> bool:
            serve(supervisor)
            return "heard to the end" in supervisor._attempts[-1].ends

        until(heard, "the guardian's last word")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(told("order", messages._ORDERS))
def test_what_is_taken_for_an_order_has_all_that_it_needs(order: Message) -> None:
    checked = messages.of_supervisor(json.loads(json.dumps(order)))
    if checked is not None:
        assert {"order", *messages._ORDERS[checked["order"]]} <= checked.keys()
        assert all(messages._ORDERED[name](value) for name, value in checked.items() if name != "order")


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(told("order", messages._ORDERS).map(json.dumps).map(str.encode) | LINES, max_size=8))
def test_whatever_is_ordered_a_guardian_continues(slot: Guardian, lines: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        slot._reports._supervisor = Link(theirs, known=True)
        ours.sendall(b"\n".join([*lines, b'{"order": "stop"}', b""]))
        slot._signals.clear()

        def obeyed() -> bool:
            slot._obey()
            return bool(slot._signals)

        until(obeyed, "the last order")
        assert slot._reports.is_supervised


@pytest.fixture
def slot() -> Iterator[Guardian]:
    """A guardian with a training process."""
    made = Guardian(SLEEP, environment(), GuardianSettings(), config.read({}))
    made._training = Training(SLEEP, environment())
    yield made
    made._training.close()


# -- what is too long --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["x" * (3 << 20), "\N{PILE OF POO}" * (1 << 20)])
def test_a_traceback_of_megabytes_costs_no_slot(supervisor: Supervisor, text: str) -> None:
    host, _, rest = supervisor._guardians.address("127.0.0.1").rpartition("/")
    port, _, token = rest.partition(":")
    guardian = link.connect(host, int(port), token, name="h1", slot=0)
    assert guardian is not None
    guardian.send(**FAULT, traceback=f"Traceback\n{text}\nValueError: of the user")

    def heard() -> list[dict[str, Any]]:
        serve(supervisor)
        return supervisor._attempts[-1].faults

    (fault,) = until(heard, "the fault")
    assert fault["traceback"].startswith("Traceback\n") and fault["traceback"].endswith(
        "\nValueError: of the user"
    )
    assert len(supervisor._guardians) == 1
    guardian.release()


def test_a_line_that_no_sender_of_ours_sends_is_skipped_and_the_next_is_heard(supervisor: Supervisor) -> None:
    with come(supervisor) as connection:
        until(lambda: serve(supervisor) or len(supervisor._guardians), "the guardian")
        long = b'{"kind": "end", "how": "' + b"x" * (2 << 20) + b'"}\n{"kind": "end", "how": "left"}\n'
        for start in range(0, len(long), 1 << 15):
            connection.sendall(long[start : start + (1 << 15)])
            serve(supervisor)
        until(lambda: serve(supervisor) or supervisor._attempts[-1].ends, "the next message")
        assert supervisor._attempts[-1].ends == ["left"]
        assert len(supervisor._guardians) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "stalled", "missing": {str(rank): ["t" * 60] * 5000 for rank in range(300)}, "seconds": 1.0},
        {"order": "know", "committed": True, "causes": [{"detail": "x" * 10**6}] * 20},
        {"kind": "where", "rank": 0, "place": None},
    ],
)
def test_what_is_sent_is_never_too_long(message: Message) -> None:
    line = messages.encode(message)
    assert len(line) <= messages.LONGEST
    assert json.loads(line).keys() == message.keys()
