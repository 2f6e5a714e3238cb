from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hvdrecover.errors import LaunchError
from hvdrecover.launch import presence
from hvdrecover.launch.presence import Supervised
from hvdrecover.machine import identity

SLEEPER = (
    "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(75)); print(flush=True); signal.pause()"
)


def of(pid: int, **facts: object) -> Supervised:
    made = Supervised("here", pid, identity(pid), 1.0, ("python", "x.py"), 2, 1, "SIGUSR1", 30.0)
    return replace(made, **facts)  # type: ignore[arg-type]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it heeds signals
        yield child
        child.kill()


def test_a_supervisor_is_found_by_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = presence.announce(folder, of(os.getpid()))
    assert presence.find(folder) == of(os.getpid())
    presence.announce(folder, of(os.getpid(), leaving=True))
    assert presence.find(folder) == of(os.getpid(), leaving=True)
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (
            lambda mine: mine.rpartition(" ")[0] + " 1",
            "has ended; ",
        ),  # its number anew
        (
            lambda mine: f"elsewhere {mine.partition(' ')[2]}",
            "SIGUSR1",
        ),
        (lambda mine: mine.replace("pid:[", "pid:[9"), "container; "),
        (lambda mine: "", "container; "),
    ],
)
def test_no_other_process_is_taken_for_it(
    other: Callable[[str], str], problem: str, process: subprocess.Popen[str]
) -> None:
    with pytest.raises(LaunchError, match=problem):
        presence.ask_to_leave(of(process.pid, process=other(identity(process.pid))))
    assert process.poll() is None
