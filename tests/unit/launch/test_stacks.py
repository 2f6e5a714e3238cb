from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.heartbeat import Phase
from hvdrecover.launch.guardian import place_in, stall_in_words
from hvdrecover.launch.training import Training
from tests.unit.launch.children import environment, until

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
from hvdrecover.state import horovod
native = SimpleNamespace(horovod_init=lambda *_: 1, horovod_rank=lambda: 0)
library = SimpleNamespace(_basics=SimpleNamespace(MPI_LIB_CTYPES=native))
horovod.join(SimpleNamespace(is_initialized=lambda: True, mpi_ops=library))"""


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
        until(lambda: place in training.stacks(), "the main thread is to wait")
        yield training
    finally:
        training.close()


def number_of(script: Path, text: str) -> int:
    return script.read_text().splitlines().index(text) + 1


def test_a_process_that_can_tells_where_its_threads_are(training: Training, script: Path) -> None:
    line = number_of(script, "    told.wait()")
    text = training.stacks()
    assert "in load" in text
    assert text.count("Current thread") == 1  # the first answer is not part of the next one
    assert place_in(text) == f"{script}:{line} in wait_for_ever"
    assert training.returncode is None


def test_a_stall_names_tensors_and_ranks() -> None:
    assert stall_in_words({1: ["a"], 2: ["a", "b"], 3: ["b", "c", "d", "e", "f"]}, 12.4) == (
        "a has waited 12 s for rank 1; "
        "a, b have waited 12 s for rank 2; "
        "b, c, d and 2 more have waited 12 s for rank 3"
    )
