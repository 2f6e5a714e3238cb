"""A link to a server on this machine that counts what is sent over it, and lets only so much through."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_HOST = "127.0.0.1"
_PIECE = 1 << 18  # bytes


class Link:
    """One end of a link.

    Attributes:
        port: where to connect to instead of the server's.
    """

    def __init__(self, port: int, sent: Any) -> None:
        self.port = port
        self._sent = sent

    def sent(self) -> int:
        """The number of bytes that have been sent to the server so far."""
        return int(self._sent.value)


@contextmanager
def link(port: int, rate: float | None = None) -> Iterator[Link]:
    """A link to a server, in a process of its own.

    Args:
        port: the server's.
        rate: bytes per second, all connections together; None for as many as go through.
    """
    context = multiprocessing.get_context("spawn")
    sent = context.Value("Q", 0)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(port, rate, sent, sending), daemon=True)
    process.start()
    try:
        yield Link(receiving.recv(), sent)
    finally:
        process.kill()
        process.join()


def _serve(port: int, rate: float | None, sent: Any, started: Any) -> None:
    pace = _Pace(rate)
    with socket.create_server((_HOST, 0), backlog=100) as server:
        started.send(server.getsockname()[1])
        while True:
            client, _ = server.accept()
            target = socket.create_connection((_HOST, port))
            for ends, counter, paced in (((client, target), sent, pace), ((target, client), None, None)):
                threading.Thread(target=_pass_on, args=(*ends, counter, paced), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, counter: Any, pace: _Pace | None) -> None:
    memory = memoryview(bytearray(_PIECE))
    with suppress(OSError):
        while count := source.recv_into(memory):
            if pace is not None:
                pace.wait(count)
                with counter.get_lock():
                    counter.value += count
            target.sendall(memory[:count])
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class _Pace:
    """Lets so many bytes through a second."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free = 0.0  # when the link is
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes are through."""
        if self._rate is not None:
            with self._lock:
                self._free = max(self._free, time.monotonic()) + nbytes / self._rate
                left = self._free - time.monotonic()
            time.sleep(max(left, 0.0))
