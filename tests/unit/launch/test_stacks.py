from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.heartbeat import Phase
from hvdrecover.launch import stacks
from hvdrecover.launch.training import Training
from tests.unit.launch.children import environment, state, until

SCRIPT = """
import sys, threading, time
from types import SimpleNamespace

{join}

def wait_for_ever(told):
    told.wait()

def load():
    time.sleep(1000)

def step():
    threading.Thread(target=load, daemon=True, name="loader").start()
    wait_for_ever(threading.Event())

step()
"""
JOIN = """\
from hvdrecover.state import startup
startup.join(SimpleNamespace(is_initialized=lambda: True))"""
# What py-spy 0.4.1 prints with --full-filenames; LIB is where the standard library is.
PY_SPY = """\
Process 27482: /env/bin/python train.py
Python v3.11.7 (/env/bin/python3.11)

Thread 27482 (idle): "MainThread"
    Condition.wait (LIB/threading.py:331)
    Event.wait (LIB/threading.py:629)
    helper (/work place/train.py:3)
    A.go.<locals>.<lambda> (/work place/train.py:13)
    <module> (/work place/train.py:14)
Thread 27484 (idle): "loader"
    other (/work place/train.py:7)
    Thread.run (LIB/threading.py:982)
""".replace("LIB", str(Path(threading.__file__).parent))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train script.py"
    path.write_text(SCRIPT.format(join=JOIN))
    return path


@pytest.fixture
def training(script: Path) -> Iterator[Training]:
    """A process that has imported an adapter, and waits in `wait_for_ever`."""
    training = Training([sys.executable, str(script)], environment())
    try:
        until(lambda: training.read().phase == Phase.STARTING, "an adapter is to be imported")
        place = " in wait_for_ever"
        until(lambda: place in stacks.take(training.pid, training.stacks), "the main thread is to wait")
        yield training
    finally:
        training.close()


def number_of(script: Path, text: str) -> int:
    return script.read_text().splitlines().index(text) + 1


def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Put a py-spy on the search path that is a shell script, and notes its arguments in a file."""
    program, noted = tmp_path / "bin" / "py-spy", tmp_path / "asked"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > "{noted}"\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return noted


def test_a_process_that_can_tells_where_its_threads_are(training: Training, script: Path) -> None:
    line = number_of(script, "    told.wait()")
    text = stacks.take(training.pid, training.stacks)
    assert "in load" in text
    assert text.count("Current thread") == 1  # the first answer is not part of the next one
    assert stacks.summary(text) == f"{script}:{line} in wait_for_ever"
    assert training.returncode is None


def test_of_a_process_that_is_stopped_py_spy_tells(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(training.pid, signal.SIGSTOP)
    until(lambda: state(training.pid) == "T", "the process is to be stopped")
    noted = answering(tmp_path, monkeypatch, f"cat <<'END'\n{PY_SPY}END")
    text = stacks.take(training.pid, training.stacks)
    assert text == PY_SPY
    assert noted.read_text() == f"dump --full-filenames --nonblocking --pid {training.pid}\n"


@pytest.mark.parametrize("failing", ["exit 1", "echo 'Permission denied' >&2; exit 1"])
def test_without_any_answer_there_are_no_stacks(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    os.kill(training.pid, signal.SIGSTOP)
    until(lambda: state(training.pid) == "T", "the process is to be stopped")
    answering(tmp_path, monkeypatch, failing)
    assert stacks.take(training.pid, training.stacks) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stacks.take(training.pid, training.stacks) == ""


def test_the_innermost_frame_of_the_users_own_says_most() -> None:
    assert stacks.summary(PY_SPY) == "/work place/train.py:3 in helper"


def test_the_main_thread_of_faulthandler_is_the_one_that_has_answered() -> None:
    text = (
        "Thread 0x00007f2d (most recent call first):\n"
        '  File "/work/data.py", line 7 in load\n'
        "\n"
        "Current thread 0x00007f2e (most recent call first):\n"
        f'  File "{threading.__file__}", line 327 in wait\n'
        '  File "<frozen runpy>", line 88 in _run_code\n'
        f'  File "{stacks.__file__}", line 1 in ours\n'
        '  File "/work/train.py", line 30 in <module>\n'
    )
    assert stacks.summary(text) == "/work/train.py:30 in <module>"
    assert stacks.summary(text[: text.index("\nCurrent")]) == "/work/data.py:7 in load"
