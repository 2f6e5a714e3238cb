from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.launch.link import Message
from tests.unit.launch.children import child, environment, line
from tests.unit.launch.scripts import write
from tests.unit.launch.supervising import FAULT, Supervisor, closed, come


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


def test_what_guardians_tell_is_heard_with_who_tells(supervisor: Supervisor) -> None:
    guardians = [come(supervisor, "h1", 0), come(supervisor, "h2", 3)]
    guardians[1].send(**FAULT)
    guardians[0].send(kind="end", how="finished")
    supervisor.serve(lambda: len(supervisor.heard) == 2, "two messages")
    assert sorted(supervisor.heard, key=str) == [
        ("h1", 0, {"kind": "end", "how": "finished"}),
        ("h2", 3, FAULT),
    ]


def test_a_guardian_that_is_killed_is_lost(supervisor: Supervisor) -> None:
    code = """
import signal, sys
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.launch import link
kept = link.connect("127.0.0.1", int(sys.argv[1]), sys.argv[2], name="h7", slot=0)
print(flush=True)
signal.pause()
"""
    _, port, token = supervisor.address
    with child(code, str(port), token) as other:
        line(other)
        supervisor.serve(lambda: len(supervisor.guardians) == 1, "a connection")
        supervisor.settle()
        assert supervisor.lost == []
        other.kill()
        supervisor.serve(lambda: supervisor.lost, "the guardian is to be missed")
    assert supervisor.lost == ["h7"]
    assert len(supervisor.guardians) == 0


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
