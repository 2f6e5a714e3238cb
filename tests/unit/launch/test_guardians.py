from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover import config
from hvdrecover.launch.guardian import Guardian
from hvdrecover.launch.training import Training
from tests.unit.launch.children import environment
from tests.unit.launch.supervising import Supervisor


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def test_a_command_that_cannot_be_started_is_reported(supervisor: Supervisor, tmp_path: Path) -> None:
    facts = {"HVDRECOVER_SUPERVISOR": supervisor.guardians.address("127.0.0.1"), "HOROVOD_ELASTIC": "1"}
    words = [sys.executable, "-m", "hvdrecover", "worker", "--no-standby", "--", str(tmp_path / "gone")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env={**environment(), **facts}, stdout=pipe, stderr=pipe) as guardian:
        supervisor.serve(lambda: supervisor.heard, "the report")
        assert "gone: can't be started: No such file" in supervisor.heard[0][2]["detail"]
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
    heard = [message for _, _, message in supervisor.heard]
    assert [each["event"]["commit"] for each in heard[:100]] == list(range(100))
    assert heard[100]["event"]["kind"] == "standby"
    ages = [each["age"] for each in heard]
    assert all(0 <= age < 60 for age in ages)
    assert list(tmp_path.iterdir()) == []  # the supervisor writes
