from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hvdrecover.launch.reports import LauncherWatch, output_is_closed
from tests.fakes.clock import FakeClock
from tests.unit.launch.children import child

LOOK = 2.0  # seconds from one look at the driver to the next
TIMEOUT = 12.0


class Watched:
    """A watch over a driver, and the time that passes for it."""

    def __init__(self, rendezvous: tuple[str, int] | None) -> None:
        self.clock = FakeClock()
        self.watch = LauncherWatch(rendezvous, TIMEOUT, self.clock)

    def after(self, seconds: float) -> str:
        """Return what it says when it looks again."""
        self.clock.advance(seconds)
        return self.watch.lost()


@pytest.fixture
def driver() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server: socket.socket) -> tuple[str, int]:
    host, port = server.getsockname()
    return host, port


def test_a_driver_that_is_refused_twice_in_a_row_is_gone(driver: socket.socket) -> None:
    watched = Watched(address(driver))
    assert watched.after(LOOK) == ""
    driver.close()
    assert watched.after(LOOK) == ""
    assert watched.after(0.1) == ""  # it is not asked all the time
    assert watched.after(LOOK) == "Horovod's driver is gone"


def test_a_driver_that_was_refused_once_may_come_back(driver: socket.socket) -> None:
    watched = Watched(address(driver))
    driver.close()
    assert watched.after(LOOK) == ""
    with socket.create_server(watched.watch._rendezvous) as again:
        assert watched.after(LOOK) == ""
        again.close()
    assert watched.after(LOOK) == ""


def test_a_driver_that_does_not_answer_is_cut_off_after_a_while() -> None:
    with ExitStack() as kept:
        driver = kept.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:  # until it takes no more
            try:
                kept.enter_context(socket.create_connection(address(driver), timeout=0.5))
            except TimeoutError:
                break
        watched = Watched(address(driver))
        assert watched.after(TIMEOUT) == ""
        assert watched.after(LOOK) == ("Horovod's driver has not answered for 12 s: this host is cut off")


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_an_output_that_nobody_reads_is_closed(kind: str) -> None:
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = (end.detach() for end in socket.socketpair())
    try:
        assert not output_is_closed(writer)
        os.close(reader)
        assert output_is_closed(writer)
    finally:
        os.close(writer)


def test_an_output_to_a_terminal_is_not_closed_as_its_end_is_told_by_a_signal() -> None:
    master, terminal = os.openpty()
    try:
        assert not output_is_closed(terminal)
        os.close(master)
        assert not output_is_closed(terminal)
    finally:
        os.close(terminal)


def test_who_loses_the_reader_of_its_output_has_lost_its_launcher() -> None:
    code = """
import sys
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.launch.reports import LauncherWatch
watch = LauncherWatch(None, 10.0, SYSTEM_CLOCK)
for _ in sys.stdin:
    sys.stderr.write(watch.lost() + "\\n")
    sys.stderr.flush()
"""
    with child(code, stdin=-1, stderr=-1) as other:
        assert other.stdin and other.stdout and other.stderr

        def asked() -> str:
            other.stdin.write("\n")  # type: ignore[union-attr]
            other.stdin.flush()  # type: ignore[union-attr]
            return str(other.stderr.readline())  # type: ignore[union-attr]

        assert asked() == "\n"
        other.stdout.close()
        assert asked() == "nobody reads its output any more\n"
