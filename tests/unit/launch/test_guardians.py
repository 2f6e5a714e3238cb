from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import config
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.launch.link import Message
from hvdrecover.launch.reports import Reports
from hvdrecover.launch.training import Training
from tests.unit.launch.children import environment
from tests.unit.launch.scripts import write
from tests.unit.launch.supervising import Supervisor, closed, come


def worker(
    supervisor: Supervisor, script: Path, *options: str, python: str | Path = sys.executable
) -> subprocess.Popen[str]:
    """Start a guardian of this script."""
    address = supervisor.guardians.address("127.0.0.1")
    facts = {"HVDRECOVER_SUPERVISOR": address, "HVDRECOVER_EVENTS": str(script.parent / "events")}
    words = [sys.executable, "-m", "hvdrecover", "worker", "--no-standby", *options, "--"]
    return subprocess.Popen(
        [*words, str(python), str(script)],
        env={**environment(), **facts, "HOROVOD_ELASTIC": "1"},
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


def test_guardians_that_are_dismissed_notice_and_are_not_lost(supervisor: Supervisor) -> None:
    guardians = [come(supervisor), come(supervisor, "h2")]
    supervisor.guardians.dismiss()
    assert all(closed(guardian) for guardian in guardians)
    assert (len(supervisor.guardians), supervisor.lost) == (0, [])
    come(supervisor, "h3")  # of the next start


def test_a_command_that_cannot_be_started_is_reported(supervisor: Supervisor, tmp_path: Path) -> None:
    with worker(supervisor, tmp_path / "train.py", python=tmp_path / "gone") as guardian:
        supervisor.serve(lambda: supervisor.heard, "the report")
        assert "gone: can't be started: No such file" in supervisor.heard[0][2]["detail"]
        assert guardian.communicate(timeout=60) == ("", "")
        assert guardian.returncode == 1


DIES_AT_FIRST = """
import os, signal
from pathlib import Path
import adapter
died = Path("{}")
if not died.exists():
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_outside_a_training_function_is_restarted_and_ends_by_order(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    def heard(kind: str) -> list[Message]:
        return [message for _, _, message in supervisor.heard if message["kind"] == kind]

    with worker(supervisor, write(tmp_path, DIES_AT_FIRST.format(tmp_path / "died"))) as guardian:
        supervisor.serve(lambda: heard("fault"), "the report of its death")
        assert (heard("fault")[0]["fault"], heard("fault")[0]["round"]) == ("crash", 0)
        supervisor.guardians.order(order="restart", pause=0.0)
        supervisor.serve(lambda: heard("done"), "the end of the second process")
        assert (heard("done")[0]["exit"], heard("done")[0]["round"]) == (0, 1)
        assert guardian.poll() is None  # the other ranks may still need another round
        supervisor.guardians.order(order="exit")
        supervisor.serve(lambda: heard("end"), "the end of the guardian")
        assert guardian.wait(timeout=60) == 0
    assert heard("end")[0]["how"] == "untrained"


# The first process dies, the second never comes to import hvdrecover, the third finishes.
HANGS_AT_ITS_RESTART = """
import os, signal
from pathlib import Path
starts = Path("starts")
start = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (start + 1))
if start == 1:
    signal.pause()
import adapter
from hvdrecover import heartbeat
heartbeat.training_begins(in_run=True)
heartbeat.committed(1, 1, 1)
if start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
heartbeat.enter(heartbeat.Phase.FINISHED)
"""

# The first process prints until nobody reads it any more, the second finishes.
BLOCKS_IN_ITS_OUTPUT = """
import os, sys
from pathlib import Path
import adapter
from hvdrecover import heartbeat
heartbeat.training_begins(in_run=True)
heartbeat.committed(1, 1, 1)
if not Path("starts").exists():
    Path("starts").write_text("x")
    while True:
        os.write(2, b"x" * 4096)
Path("starts").write_text("xxx")
heartbeat.enter(heartbeat.Phase.FINISHED)
"""


@pytest.mark.parametrize(
    ("script", "limit"),
    [(HANGS_AT_ITS_RESTART, "--startup-timeout"), (BLOCKS_IN_ITS_OUTPUT, "--hang-timeout")],
)
def test_a_process_that_hangs_is_killed_and_restarted(
    script: str, limit: str, supervisor: Supervisor, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    with worker(supervisor, write(tmp_path, script), limit, "5") as guardian:
        supervisor.serve(lambda: starts.exists() and starts.read_text() == "xxx", "the restart")
        guardian.communicate(timeout=60)
    assert guardian.returncode == 0
    supervisor.settle()
    deaths = [message["fault"] for _, _, message in supervisor.heard if message["kind"] == "fault"]
    assert deaths.count("hang") == 1


EMITS_AND_DIES = """
import os, signal
from hvdrecover.config import read
from hvdrecover.events import Events, Pipe
log = Events(Pipe(read().slot[3]).add, "h")
for number in range(100):
    log.emit("commit", commit=number)
os.kill(os.getpid(), signal.SIGKILL)
"""


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
