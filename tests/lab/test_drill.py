"""``hvdrecover drill --lab``: a host is cut off, and nothing is left of the hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hvdrecover.drill.lab import traces
from tests.integration.conftest import LONG
from tests.support.commands import wait_until
from tests.support.jobs import PATIENCE, read_events
from tests.support.lab import SLOW_HOSTS

FAULTS = {"host-cut-off", "kill"}
SCRIPT = [sys.executable, "-m", "hvdrecover.examples.torch_digits"]
JANITOR = "hvdrecover.drill.lab"
EPOCHS = ("--epochs", "4", "--step-seconds", "0.1", "--commit-every", "2")


def command(folder: Path, *words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "hvdrecover", "drill", "-np", "2", "--lab", "3", "--output", str(folder)),
        *words,
    ]


def lab_of(drill: int) -> int:
    """The number of the lab that a drill has made."""
    (janitor,) = (each for each in psutil.Process(drill).children() if each.cmdline()[-2:-1] == [JANITOR])
    return int(janitor.cmdline()[-1])


def left(folder: Path) -> list[str]:
    """The processes that have a folder on their command line."""
    lines = (" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(folder) in line]


@LONG
@pytest.mark.parametrize("options", [(), ("--virtual-ranks", "4")])
def test_the_torch_example_recovers_from_the_loss_of_a_host(options: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "drill"
    words = ["--seed", "1", "--faults", ",".join(sorted(FAULTS)), "--hang-timeout", "60", "--json", "--"]
    words += [*SCRIPT, *EPOCHS, *options]
    environ = {**os.environ, **SLOW_HOSTS}
    done = subprocess.run(
        command(folder, *words), env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["recovers"], found["findings"]) == (True, [])
    kinds = {name: (kind["count"], kind["recovered"]) for name, kind in found["kinds"].items()}
    assert kinds == dict.fromkeys(FAULTS, (1, 1))

    # The host was really lost.
    events = [event for run in folder.glob("faults-*") for event in read_events(run / "events", "fault")]
    assert sum(event["fault"] == "lost_host" for event in events) == 1

    # A spare host takes the place of a lost one, so that commits can be compared up to the end; with virtual
    # ranks they can while there is none, too.
    newest = max(int(path.name.rpartition("c")[2]) for path in (folder / "clean/checkpoint").glob("g*"))
    assert [run["comparison"]["compared"] for run in found["runs"]] == [newest] * len(found["runs"])
    assert {run["comparison"]["samples_miscounted"] for run in found["runs"]} == {0}

    # What was to strike was said before it did.
    lines = [line for line in done.stderr.splitlines() if "drill: faults-1" in line]
    assert "is to have" in lines[0] and "(the host of rank 1) at commit" in lines[0]
    assert left(folder) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_drill_that_is_ended_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "drill"
    words = ["--faults", "kill", "--", sys.executable, "-c", "import time; time.sleep(1000)"]
    with subprocess.Popen(command(folder, *words)) as drill:
        wait_until((folder / "clean/log.txt").exists)
        lab = lab_of(drill.pid)
        assert traces(lab)
        drill.send_signal(number)
        assert drill.wait(PATIENCE) == code
    assert traces(lab) == []
    assert left(folder) == []
