from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdrecover.launch.training import Training
from tests.unit.launch.children import descriptors, environment, until
from tests.unit.launch.scripts import write

Start = Callable[..., Training]
WAIT = "\nimport signal\nwhile True:\n    signal.pause()\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start scripts, which are ended in the end."""
    started: list[Training] = []

    def start(text: str, **options: bool) -> Training:
        script = write(tmp_path, text)
        started.append(Training([sys.executable, str(script)], environment(), **options))
        return started[-1]

    yield start
    for training in started:
        training.kill()
        if training._descriptors:
            training.close()


def test_what_horovod_tells_of_a_stall_is_heard_once(start: Start) -> None:
    training = start(
        "import adapter, os\n"
        "from hvdrecover import heartbeat\n"
        """os.write(int(os.environ["HOROVOD_STALL_REPORT"]), b'{"stalled": {"1": ["a", "b"]}}\\n')\n"""
        "heartbeat.notify(noted=True)\n" + WAIT
    )
    until(lambda: training.notes().get("noted"), "its note")
    assert training.stalled() == {1: ["a", "b"]}
    assert training.stalled() == {}


def test_at_the_second_commit_the_libraries_are_told_and_the_scripts_own_modules_are_not(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("")
    training = start(
        "import adapter, own, colorsys, json.tool\n"
        "__spec__ = colorsys.__spec__  # as that of a program which is part of a library\n"
        "from hvdrecover import heartbeat\n"
        "heartbeat.committed(1, 1, 1)\n"
        "heartbeat.notify(before=1)\n"
        "import wave\n"
        "heartbeat.committed(1, 2, 2)\n"
    )
    assert training.process.wait(60) == 0
    assert list(training.notes()) == ["before", "modules"]
    modules = training.notes()["modules"]
    assert {"colorsys", "json.tool", "wave", "hvdrecover.state.horovod"} <= set(modules)
    assert not {"own", "adapter", "__main__"} & set(modules)


def test_a_script_hands_nothing_of_it_on_to_programs_that_it_starts(start: Start) -> None:
    program = 'import os; print(os.listdir("/proc/self/fd"), [n for n in os.environ if "HVDRECOVER" in n])'
    training = start(
        "import adapter, subprocess, sys\n"
        "from hvdrecover import heartbeat\n"
        f"command = [sys.executable, '-c', {program!r}]\n"
        "heartbeat.notify(seen=subprocess.check_output(command, close_fds=False, text=True))\n",
        rejoins=True,
    )
    assert training.process.wait(60) == 0
    shown = training.notes()["seen"]
    assert shown.endswith("[]\n")
    assert not any(f"'{number}'" in shown for number in training._descriptors)


def test_closing_and_forgetting_it_frees_all_and_ends_what_is_left() -> None:
    before = descriptors()
    training = Training([sys.executable, "-c", WAIT], environment())
    assert len(descriptors()) == len(before) + 5
    training.close()
    assert training.returncode == -signal.SIGKILL
    del training
    assert descriptors() == before
