"""The supervisor's connections: strangers that reach its port, and guardians."""

from __future__ import annotations

import dataclasses
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdrecover import config
from hvdrecover.launch import ends, link, waits
from hvdrecover.launch.guardian import Guardian
from hvdrecover.launch.link import ConnectedGuardian, Guardians, Link, Message
from hvdrecover.launch.training import Training
from tests.fakes.clock import FakeClock
from tests.unit.launch.children import child, environment, line, until


class Supervisor:
    """Serves guardians as the supervisor does, and keeps their messages."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.lost: list[ConnectedGuardian] = []
        self.attempts: list[ends.Attempt] = []
        self.clock = FakeClock()
        self.selector = selectors.DefaultSelector()
        self.guardians = Guardians(self.selector, self._hear, self.lost.append, self._greeting, self.clock)

    def _hear(self, guardian: ConnectedGuardian, message: Message) -> None:
        self.heard.append(message)
        guardian.ended = message.get("kind") == "end"

    def _greeting(self) -> list[Message]:
        return [{"order": "know", **ends.known(self.attempts)}]

    def serve(self, until_then: Callable[[], object], what: str) -> None:
        def turn() -> object:
            for key, _ in self.selector.select(0.05):
                key.data()
            return until_then()

        until(turn, what)

    @property
    def address(self) -> tuple[str, int, str]:
        settings = config.read({"HVDRECOVER_SUPERVISOR": self.guardians.address("127.0.0.1")})
        assert settings.supervisor is not None
        return settings.supervisor


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.guardians.close()
    supervisor.selector.close()


# A supervisor of few files hears strangers that say nothing, and then a guardian.
FEW_FILES = """
import resource, selectors
from hvdrecover.launch.link import Guardians
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
selector, heard = selectors.DefaultSelector(), []
guardians = Guardians(selector, lambda guardian, _: heard.append(guardian.host), print, lambda: [])
print(guardians.address("h"), flush=True)
while not heard:
    for key, _ in selector.select():
        key.data()
print(heard[0], len(guardians._strangers) < 64, flush=True)
"""


def test_hundreds_of_silent_connections_keep_no_guardian_out_where_files_are_few() -> None:
    with child(FEW_FILES, env=environment()) as other:
        port, token = line(other).removeprefix("h/").split(":")
        silent = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(300)]
        guardian = link.connect("127.0.0.1", int(port), token, name="honest", slot=0)
        guardian.send(kind="fault")
        assert line(other) == "honest True"
        for each in [*silent, guardian]:
            each.close()


def test_who_says_nothing_is_dropped_when_its_time_is_over(supervisor: Supervisor) -> None:
    guardians, (host, port, _) = supervisor.guardians, supervisor.address
    silent = socket.create_connection((host, port), timeout=60)
    supervisor.serve(lambda: guardians._strangers, "a connection")
    guardian = link.connect(*supervisor.address, name="h1", slot=0)
    supervisor.serve(lambda: len(guardians), "the guardian")
    supervisor.clock.advance(waits.MESSAGE - 1)
    guardians.tend()
    assert len(guardians._strangers) == 1
    supervisor.clock.advance(1)
    guardians.tend()
    assert (len(guardians._strangers), len(guardians), silent.recv(1)) == (0, 1, b"")
    guardian.send(kind="end", how="left")
    supervisor.serve(lambda: supervisor.heard, "its end")
    guardian.close()
    supervisor.serve(lambda: not len(guardians), "its connection to end")
    assert supervisor.lost == []


def test_a_message_that_comes_in_pieces_is_put_together() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as sender:
        end = Link(listener.accept()[0])
        text = json.dumps({"detail": "ü" * 50_000}, ensure_ascii=False).encode() + b'\n{"second"'
        found: list[Message] = []
        for start in range(0, len(text), 40_001):  # also in the middle of a letter
            sender.sendall(text[start : start + 40_001])
            found += end.receive()
        while not found:
            found += end.receive()
        assert found == [{"detail": "ü" * 50_000}]
        sender.sendall(b": 2}\n")
        assert until(end.receive, "a message") == [{"second": 2}]
    end.close()


@pytest.mark.parametrize(("committed", "end"), [(False, "first_error"), (True, "crash")])
def test_a_command_that_cannot_be_started_ends_only_a_job_that_has_not_trained(
    committed: bool, end: str, supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor.attempts.append(ends.Attempt(1, committed=committed))
    facts = {"HVDRECOVER_SUPERVISOR": supervisor.guardians.address("127.0.0.1"), "HOROVOD_ELASTIC": "1"}
    words = [sys.executable, "-m", "hvdrecover", "worker", "--no-standby", "--", str(tmp_path / "gone")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env={**environment(), **facts}, stdout=pipe, stderr=pipe) as guardian:
        supervisor.serve(lambda: supervisor.heard, "the report")
        assert "gone: can't be started: No such file" in supervisor.heard[0]["detail"]
        assert (supervisor.heard[0]["end"], supervisor.heard[0]["final"]) == (end, True)
        assert guardian.communicate(timeout=60) == (b"", b"")
        assert guardian.returncode == 1


EMITS_AND_DIES = """
import os, signal
from hvdrecover.config import read
from hvdrecover.events import Events, Pipe
log = Events(Pipe(read().slot[3]).add, "h")
for number in range(100):
    log.emit("commit", commit=number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_events_of_a_killed_process_reach_the_supervisor_with_their_age(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    settings = dataclasses.replace(config.read({}), events=tmp_path, supervisor=supervisor.address)
    guardian = Guardian(["train"], {}, settings)
    training = guardian._training = Training([sys.executable, "-c", EMITS_AND_DIES], environment())
    training.process.wait(60)
    guardian._forward_events()
    training.close()
    guardian._events.emit("standby", slot=0, ready=True)
    supervisor.serve(lambda: len(supervisor.heard) == 101, "all events")
    assert [each["event"]["commit"] for each in supervisor.heard[:100]] == list(range(100))
    assert supervisor.heard[100]["event"]["kind"] == "standby"
    assert all(0 <= each["age"] < 60 for each in supervisor.heard)
    assert list(tmp_path.iterdir()) == []  # the supervisor writes
