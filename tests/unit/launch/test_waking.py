from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Iterator

import pytest

from hvdrecover.launch.waking import Waking
from tests.unit.launch.children import child, descriptors, line

NOTED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
FOR_EVER = 1000.0  # pytest's own time limit ends it


@pytest.fixture
def waking() -> Iterator[Waking]:
    with Waking(NOTED) as waking:
        yield waking


@pytest.mark.timeout(60)
def test_a_signal_ends_a_wait_at_once() -> None:
    with child(
        "import os, signal; print(flush=True); input(); os.kill(os.getppid(), signal.SIGUSR1)", stdin=-1
    ) as other:
        line(other)
        with Waking([signal.SIGUSR1]) as waking:
            assert other.stdin is not None
            other.stdin.write("go\n")
            other.stdin.flush()
            assert waking.wait(FOR_EVER) == [signal.SIGUSR1]


@pytest.mark.timeout(60)
def test_the_end_of_a_child_ends_a_wait(waking: Waking) -> None:
    with child("pass"):
        assert waking.wait(FOR_EVER) == [signal.SIGCHLD]


def test_signals_are_handed_out_once_and_in_their_order(waking: Waking) -> None:
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
        signal.raise_signal(number)
    assert waking.wait(0.0) == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2]
    assert waking.wait(0.0) == []


@pytest.mark.timeout(60)
def test_a_flood_of_signals_does_not_block_or_get_lost(waking: Waking) -> None:
    for _ in range(70_000):  # more than the bytes that a pipe holds
        signal.raise_signal(signal.SIGUSR1)
    noted = 0
    while found := waking.wait(0.0):
        noted += len(found)
    assert noted == 70_000


@pytest.mark.timeout(60)
def test_what_there_is_to_read_is_served() -> None:
    read, write = os.pipe()
    served: list[bytes] = []
    writer = threading.Thread(target=os.write, args=(write, b"news"))
    try:
        with Waking([]) as waking:
            waking.selector.register(read, selectors.EVENT_READ, lambda: served.append(os.read(read, 100)))
            assert waking.wait(0.0) == [] and served == []
            writer.start()
            assert waking.wait(FOR_EVER) == []
        writer.join()
        assert served == [b"news"]
    finally:
        os.close(read)
        os.close(write)


def test_in_the_end_all_is_as_it_was() -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, own)
    try:
        handlers, opened = [signal.getsignal(number) for number in NOTED], descriptors()
        with Waking(NOTED):
            assert own not in [signal.getsignal(number) for number in NOTED]
        assert [signal.getsignal(number) for number in NOTED] == handlers
        assert signal.set_wakeup_fd(-1) == -1
        assert descriptors() == opened
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_children_do_not_inherit_its_pipe() -> None:
    before = descriptors()
    with Waking([]):
        pipe = {
            target for number, target in descriptors().items() if number not in before and "pipe" in target
        }
        assert len(pipe) == 1
        with child("import signal; print(flush=True); signal.pause()", close_fds=False) as other:
            line(other)
            assert not pipe & set(descriptors(other.pid).values())
