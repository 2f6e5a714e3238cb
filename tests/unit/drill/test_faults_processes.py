from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdrecover.drill.faults import Fault, find
from tests.unit.drill.drilled import Counting
from tests.unit.launch.children import descriptors, state, until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Counting]:
    with ExitStack() as stack:
        yield Counting(tmp_path, stack, ranks=3)


def fault(name: str) -> Fault:
    return find([name])[0]


@pytest.mark.parametrize(
    ("name", "rank", "killed"),
    [
        ("kill", 1, {"1"}),
        ("kill", 0, {"0"}),
        ("kill-rank-0", 2, {"0"}),
        ("kill-all", 1, {"0", "1", "2"}),
        ("launcher-killed", 1, {"launcher"}),
    ],
)
def test_those_are_killed_and_nobody_else(run: Counting, name: str, rank: int, killed: set[str]) -> None:
    fault(name).strike(run, rank)
    for each in killed:
        assert run.children[each].wait(60) == -signal.SIGKILL
    assert set(run.alive()) == set(run.children) - killed
    fault(name).strike(run, rank)  # who is dead already is no problem


def test_a_stopped_rank_does_nothing_and_the_others_continue(run: Counting) -> None:
    fault("stop").strike(run, 1)
    until(lambda: state(run.process_of(1)) == "T", "rank 1 is to be stopped")
    stands, goes = run.count("1"), run.count("2")
    until(lambda: run.count("2") > goes + 20, "rank 2 is to continue")
    assert run.count("1") == stands


@pytest.mark.parametrize(
    ("name", "order"), [("loop", "loop"), ("segfault", "segfault"), ("out-of-memory", "hunger")]
)
def test_what_only_the_process_can_do_is_asked_of_it(run: Counting, name: str, order: str) -> None:
    fault(name).strike(run, 2)
    assert run.orders == [(2, order)]


def test_a_preempted_run_is_started_again_when_it_has_left(run: Counting) -> None:
    fault("preemption").strike(run, 0)
    assert run.children["supervisor"].poll() == -signal.SIGTERM
    assert (run.starts, set(run.alive())) == (1, {"0", "1", "2", "launcher"})


def test_a_slow_rank_is_stopped_again_and_again_and_continues(run: Counting) -> None:
    slow = fault("slow-rank")
    slow.strike(run, 1)
    for _ in range(3):
        until(lambda: state(run.process_of(1)) == "T", "the rank is to be stopped")
        until(lambda: state(run.process_of(1)) != "T", "the rank is to continue")
    before = run.count("1")
    until(lambda: run.count("1") > before, "the rank is to make progress")
    slow.end(run)
    until(lambda: not _is_watched(run.process_of(1)), "the fault is to let go of the rank")
    assert state(run.process_of(1)) != "T"


def test_a_slow_rank_that_dies_ends_the_fault(run: Counting) -> None:
    fault("slow-rank").strike(run, 1)
    assert _is_watched(run.process_of(1))
    run.children["1"].kill()
    run.children["1"].wait()
    until(lambda: "anon_inode:[pidfd]" not in descriptors().values(), "nothing is to be left open")


def test_a_rank_may_be_slow_twice(run: Counting) -> None:
    for _ in range(2):
        fault("slow-rank").strike(run, 0)
        until(lambda: state(run.process_of(0)) == "T", "the rank is to be stopped")
        fault("slow-rank").end(run)
        until(lambda: not _is_watched(run.process_of(0)), "the fault is to let go of the rank")


def _is_watched(process: int) -> bool:
    """Return whether this process has a descriptor of another one."""
    for number in descriptors():
        try:
            text = Path(f"/proc/self/fdinfo/{number}").read_text()
        except FileNotFoundError:
            continue
        if f"Pid:\t{process}\n" in text:
            return True
    return False


def test_the_descriptors_of_processes_are_found() -> None:
    held = os.pidfd_open(os.getpid())
    assert _is_watched(os.getpid())
    os.close(held)
    assert not _is_watched(os.getpid())
