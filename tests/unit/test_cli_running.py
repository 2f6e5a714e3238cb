"""``hvdrecover status`` and ``hvdrecover stop``: what they say, and how they exit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover import cli, machine
from hvdrecover.config import PREEMPTED
from hvdrecover.launch import presence
from hvdrecover.launch.presence import Supervised
from tests.unit.reporting.runs import TWO, Run

DOCS = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
LEAVES = """
import signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.reporting.runs import TWO, Run
def leave(*_):
    run = Run(Path(sys.argv[1]))
    run.commit(TWO, 1, {9: 50})
    run.report(51, "durable", rank=0, generation=1, commit=int(sys.argv[3]), bytes=1, seconds=0.5)
    run.report(52, "end", pid=5, code=75, reason="left")
    sys.exit(75)
signal.signal(signal.SIGUSR1, leave)
print(flush=True)
signal.pause()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two ranks that trains: one fault, one commit that is not durable, a standby for each slot."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVDRECOVER_EVENTS", str(tmp_path / "events"))
    run = Run(tmp_path / "events")
    run.report(0, "start", pid=5, attempt=1, command=["python", "train.py"])
    run.rendezvous(1, TWO, 1, 0, "initial")
    run.commit(TWO, 1, {1: 2, 2: 3})
    run.report(3, "durable", rank=0, generation=1, commit=1, bytes=10, seconds=0.5)
    run.report(4, "standby", pid=9, slot=0, ready=True)
    run.report(4, "standby", "node-2", 9, slot=0, ready=True)
    run.fault(5, detail="killed by SIGKILL", rank=1, host="node-2")
    run.report(5, "standby", "node-2", 9, slot=0, ready=False)
    return run


def supervised(pid: int, **facts: object) -> Supervised:
    known = {"processes": 3, "least": 2, "stop_signal": "SIGUSR1", "grace": 30.0, "leaving": False, **facts}
    return Supervised("node-1", pid, machine.identity(pid), 1.0, ("python", "train.py"), **known)


@pytest.fixture
def ask(capsys):
    def ask(*words):
        code = cli.main(list(words))
        return code, *capsys.readouterr()

    return ask


def pairs(text):
    return dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())


def test_status_says_what_runs(run, ask):
    presence.announce(run.folder, supervised(os.getpid()))
    code, text, _ = ask("status")
    found = json.loads(ask("status", "--json")[1])
    said = pairs(text)
    assert code == 0
    assert (said["state"], said["ranks"], said["standbys"]) == ("recovering", "2 of 3; 2 suffice", "1 ready")
    assert said["supervisor"] == f"process {os.getpid()} on node-1"
    assert said["command"] == "python train.py"
    assert said["progress"] == "commit 2 in generation 1 with 2 ranks"
    assert re.match(r"commit 1, \S+ d \S+ h old; 1 in all", said["durable"])
    assert "crash of rank 1 on node-2: killed by SIGKILL; not recovered yet" in said["last fault"]
    run = found["run"]
    assert (found["running"], found["supervisor"]["processes"]) == (True, 3)
    assert (run["ranks"], run["standbys"], run["commit"]["number"]) == (2, 1, 2)
    assert (run["storage"]["durable"]["number"], run["faults"][-1]["kind"]) == (1, "crash")
    assert [key for key in (*found, *found["supervisor"]) if f"`{key}`" not in DOCS] == []


def test_status_tells_a_run_whose_supervisor_is_gone_from_one_that_leaves_and_one_that_has_ended(run, ask):
    announced = presence.announce(run.folder, supervised(os.getpid(), leaving=True))
    assert pairs(ask("status")[1])["state"] == "recovering; it leaves at its next commit"
    announced.unlink()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        killed = supervised(child.pid)
    presence.announce(run.folder, killed)
    code, text, _ = ask("status")
    assert (code, pairs(text)["state"][:34]) == (1, "gone: its supervisor has ended wit")
    assert json.loads(ask("status", "--json")[1])["running"] is False
    run.report(9, "end", pid=5, code=1, reason="gave up")
    code, text, _ = ask("status")
    assert (code, pairs(text)["state"]) == (1, "ended before it was finished, with code 1: gave up")


@pytest.mark.parametrize(
    ("durable", "code", "said"),
    [("9", 0, "commit 9 is durable\n"), ("8", 1, "commit 8 is durable, commit 9 is not\n")],
)
def test_stop_waits_until_the_job_has_left(run, ask, durable, code, said):
    words = [sys.executable, "-c", LEAVES, str(run.folder), str(Path(__file__).parents[2]), durable]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        presence.announce(run.folder, supervised(child.pid))
        found, text, errors = ask("stop", str(run.folder))
        assert child.wait() == PREEMPTED
    assert (found, text.endswith(f" {75}; {said}")) == (code, True)
    assert errors == "hvdrecover: the job leaves at its next commit, within 30 s\n"
