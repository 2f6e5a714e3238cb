"""Strangers that reach the supervisor's port without belonging to the job."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hvdrecover.launch import link, waits
from tests.fakes.clock import FakeClock
from tests.unit.launch.children import child, environment, line, until
from tests.unit.launch.supervising import FAULT, Supervisor, come

# A supervisor of few files hears strangers that say nothing, and then a guardian.
FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.unit.launch.supervising import Supervisor
supervisor = Supervisor()
print(*supervisor.address[1:], flush=True)
supervisor.serve(lambda: supervisor.heard, "the guardian")
print(supervisor.heard[0][0], len(supervisor.guardians._strangers) < 64, flush=True)
"""


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor(clock=FakeClock())
    yield supervisor
    supervisor.close()


@pytest.fixture
def silent(supervisor: Supervisor) -> socket.socket:
    """A connection that says nothing."""
    host, port, _ = supervisor.address
    before = len(supervisor.guardians._strangers)
    silent = socket.create_connection((host, port))
    supervisor.serve(lambda: len(supervisor.guardians._strangers) > before, "a connection")
    return silent


def ended(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_hundreds_of_silent_connections_keep_no_guardian_out_where_files_are_few() -> None:
    with child(FEW_FILES, env=environment()) as other:
        port, token = line(other).split()
        silent = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(300)]
        guardian = link.connect("127.0.0.1", int(port), token, name="honest", slot=0)
        assert guardian is not None
        guardian.send(**FAULT)
        assert line(other) == "honest True"
        for each in silent:
            each.close()
        guardian.release()


def test_who_says_nothing_is_dropped_when_its_time_is_over(
    supervisor: Supervisor, silent: socket.socket
) -> None:
    guardian = come(supervisor)
    supervisor.clock.advance(waits.MESSAGE - 1)
    supervisor.guardians.tend()
    assert len(supervisor.guardians._strangers) == 1
    supervisor.clock.advance(1)
    supervisor.guardians.tend()
    assert (len(supervisor.guardians._strangers), len(supervisor.guardians)) == (0, 1)
    until(lambda: ended(silent), "the stranger is to be dropped")
    guardian.send(kind="end", how="left")
    supervisor.serve(lambda: supervisor.heard, "the guardian")
    assert supervisor.lost == []
