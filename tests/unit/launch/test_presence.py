from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hvdrecover.errors import LaunchError
from hvdrecover.launch import presence
from hvdrecover.launch.presence import Announcement, Supervised
from hvdrecover.process_identity import identity

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


def test_a_supervisor_is_found_by_its_file_for_as_long_as_it_announces_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Announcement(folder, of(os.getpid())) as announced:
        assert presence.find(folder) == of(os.getpid())
        announced.leaves()
        found = presence.find(folder)
        assert found == of(os.getpid(), leaving=True)
        assert found is not None and found.lives
    assert presence.find(folder) is None
    assert list(folder.iterdir()) == []


def test_one_that_lives_goes_before_later_ones_that_do_not(
    tmp_path: Path, process: subprocess.Popen[str]
) -> None:
    killed = of(process.pid, began=9.0)
    Announcement(tmp_path, killed)
    process.kill()
    process.wait()
    assert presence.find(tmp_path) == killed
    assert not killed.lives
    Announcement(tmp_path, of(os.getpid()))
    assert presence.find(tmp_path) == of(os.getpid())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}', "null", '{"command": 7}'])
def test_a_file_that_says_nothing_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "supervisor-here-1.json").write_text(text)
    assert presence.find(tmp_path) is None


def test_what_a_later_version_adds_is_passed_over(tmp_path: Path) -> None:
    Announcement(tmp_path, of(os.getpid()))
    path = tmp_path / f"supervisor-here-{os.getpid()}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mood": "good"}))
    assert presence.find(tmp_path) == of(os.getpid())


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError) as caught:
        Announcement(tmp_path / "file", of(os.getpid()))
    assert caught.value.program == os.fspath(tmp_path / "file")
    assert "HVDRECOVER_EVENTS" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_it_is_asked_to_leave_by_the_signal_that_it_heeds(process: subprocess.Popen[str]) -> None:
    leaving = presence.ask_to_leave(of(process.pid))
    assert leaving.wait(60)
    assert process.wait() == 75


def test_one_that_leaves_already_is_only_waited_for(process: subprocess.Popen[str]) -> None:
    leaving = presence.ask_to_leave(of(process.pid, leaving=True))
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert leaving.wait(60)


def test_waiting_has_an_end(process: subprocess.Popen[str]) -> None:
    assert not presence.ask_to_leave(of(process.pid, leaving=True)).wait(0.0)


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


def test_one_that_heeds_no_signal_can_not_be_asked(process: subprocess.Popen[str]) -> None:
    with pytest.raises(LaunchError, match="HVDRECOVER_STOP_SIGNALS named none"):
        presence.ask_to_leave(of(process.pid, stop_signal=""))
    assert process.poll() is None
