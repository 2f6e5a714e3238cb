"""The clock that a drill sets, seen by real processes into which it is preloaded."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from hvdrecover.drill.faults.clock import ClockJump
from tests.unit.drill.drilled import Counting
from tests.unit.launch.children import child, environment, line

# Answers each line of input with the result of an expression.
ANSWERING = """
import ctypes, datetime, json, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
class Spec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]
def until(clock, seconds):
    now = time.clock_gettime_ns(clock) + int(seconds * 1e9)
    return ctypes.byref(Spec(now // 10**9, now % 10**9))
def locked():
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    return mutex
def timed(call):
    begin = time.monotonic()
    return call(), time.monotonic() - begin
print("ready", flush=True)
for given in sys.stdin:
    print(json.dumps(eval(given)), flush=True)
"""
TIMES = (
    "[time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp(), libc.time(None),"
    " time.clock_gettime(5), time.monotonic()]"
)
ETIMEDOUT = 110


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    with ExitStack() as stack:
        yield Counting(tmp_path_factory.mktemp("run"), stack, ranks=0)


@pytest.fixture(scope="module")
def environ(run: Counting) -> dict[str, str]:
    """The environment that a process of the run is started with."""
    return {**environment(), **ClockJump().prepare(run)}


class Answering:
    """A process of the run."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert line(process) == "ready"

    def __call__(self, expression: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{expression}\n")
        self._process.stdin.flush()
        return json.loads(line(self._process))


@pytest.fixture(scope="module")
def running(environ: dict[str, str]) -> Iterator[Answering]:
    with child(ANSWERING, env=environ, stdin=subprocess.PIPE) as process:
        yield Answering(process)


@pytest.fixture
def ask(running: Answering) -> Answering:
    return running


@pytest.fixture(autouse=True)
def the_clock_jumps_back(run: Counting) -> Iterator[None]:
    yield
    ClockJump().end(run)


def assert_ahead(ask: Answering, seconds: float) -> None:
    before = [time.time(), time.monotonic()]
    *wall, monotonic = ask(TIMES)
    after = [time.time(), time.monotonic()]
    for told in wall:  # whole seconds, or those of the kernel's last tick, in some
        assert before[0] + seconds - 1.1 < told < after[0] + seconds + 0.1
    assert before[1] <= monotonic <= after[1]


@pytest.mark.parametrize("seconds", [3600.0, -86400.0, 2.75, -2.75, 1e8])
def test_a_running_process_sees_the_jump_and_the_jump_back(
    run: Counting, ask: Answering, seconds: float
) -> None:
    fault = ClockJump(seconds)
    assert_ahead(ask, 0.0)
    fault.strike(run, 0)
    assert_ahead(ask, seconds)
    assert all(
        ask("[libc.clock_gettime(0, ctypes.byref(s := Spec())) == 0 <= s.nsec < 10**9 for _ in range(99)]")
    )
    fault.end(run)
    assert_ahead(ask, 0.0)


def test_a_process_that_starts_later_sees_it_and_other_programs_do(
    run: Counting, environ: dict[str, str], ask: Answering
) -> None:
    ClockJump().strike(run, 0)
    with child(ANSWERING, env=environ, stdin=subprocess.PIPE) as process:
        later = Answering(process)
        assert_ahead(later, 3600.0)
        assert int(later("os.popen('date +%s').read()")) > time.time() + 3000


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
@pytest.mark.parametrize(
    ("wait", "answer"),
    [
        ("libc.clock_nanosleep(0, 1, until(0, 0.2), None)", 0),
        ("libc.clock_nanosleep(1, 1, until(1, 0.2), None)", 0),
        ("libc.clock_nanosleep(0, 0, ctypes.byref(Spec(0, 200000000)), None)", 0),
        ("libc.sem_timedwait(ctypes.create_string_buffer(64), until(0, 0.2))", -1),
        (
            "libc.pthread_cond_timedwait(ctypes.create_string_buffer(64), locked(), until(0, 0.2))",
            ETIMEDOUT,
        ),
        ("libc.pthread_mutex_timedlock(locked(), until(0, 0.2))", ETIMEDOUT),
        ("time.sleep(0.2)", None),
        ("threading.Event().wait(0.2)", False),
    ],
)
def test_waits_last_as_long_as_they_are_to(
    run: Counting, ask: Answering, wait: str, answer: object, seconds: float
) -> None:
    ClockJump(seconds).strike(run, 0)
    told, waited = ask(f"timed(lambda: {wait})")
    assert told == answer
    assert 0.19 < waited < 100.0  # not at once, and not an hour


def test_the_times_of_files_are_the_machines(run: Counting, ask: Answering) -> None:
    ClockJump().strike(run, 0)
    written = run.folder / "written"
    assert (
        ask(f"[open({str(written)!r}, 'w').close(), os.stat({str(written)!r}).st_mtime][1]") < time.time() + 1
    )


def test_without_the_drill_the_library_does_nothing(run: Counting, environ: dict[str, str]) -> None:
    ClockJump().strike(run, 0)
    without = {name: value for name, value in environ.items() if name != "HVDRECOVER_DRILL_CLOCK"}
    with child(ANSWERING, env=without, stdin=subprocess.PIPE) as process:
        assert_ahead(Answering(process), 0.0)


def test_what_the_user_preloads_stays(run: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/one.so:/lib/two.so")
    assert ClockJump().prepare(run)["LD_PRELOAD"] == f"{run.folder}/clock.so:/lib/one.so:/lib/two.so"


@pytest.mark.parametrize("name", ["a folder", "a:folder"])
def test_a_folder_that_can_not_be_named_in_a_list_is_refused(
    run: Counting, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert ClockJump().lacks(run) == ""
    monkeypatch.setattr(run, "folder", run.folder / name)
    assert "--output" in ClockJump().lacks(run)
