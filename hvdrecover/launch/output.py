"""Output that never blocks its writer for long, even if the reader stops reading."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvdrecover.launch import waits

_MOST = 1 << 24  # maximum bytes held for a slow reader or a full disk
_PIECE = 4096  # bytes that a pipe takes at once, so that lines of several writers are not mixed
_RETRY = 0.2  # seconds

Report = Callable[[str, str], object]  # takes the name of a stream, and the problem


class Outlet(io.TextIOBase):
    """A text stream whose thread writes to a descriptor; text that does not fit is lost, and counted."""

    def __init__(
        self, descriptor: int, name: str, report: Report | None = None, encoding: str = "utf-8"
    ) -> None:
        self._descriptor = descriptor
        self._name = name
        self._encoding = encoding
        self._report = report  # called once each time that writing begins to fail
        self._held = bytearray()
        self._lost = 0
        self._fails = self._reported = False
        self._waits = report is not None  # if so, writers wait up to two seconds for a slow reader
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "backslashreplace")
        with self._changed:
            if self._waits and not self._has_room():
                self._waits = self._changed.wait_for(self._has_room, waits.OUTPUT)
            if self._has_room():
                if self._lost:
                    self._held += f"hvdrecover: {self._lost} lines of output were lost here\n".encode()
                self._held += data
                self._lost = 0
                if self._thread is None or not self._thread.is_alive():  # a forked child lacks it
                    self._thread = threading.Thread(target=self._pump, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
                return len(text)
            self._lost += data.count(b"\n")
        self._tell(f"its reader does not read, and {_MOST >> 20} MiB wait")
        return len(text)

    def drain(self) -> None:
        """Wait until all text is written, a write fails, or the reader has taken nothing for a while."""
        with self._changed:
            while self._held and not self._fails and self._changed.wait(waits.LAST_OUTPUT):
                pass

    def _has_room(self) -> bool:
        return len(self._held) < (_MOST // 2 if self._lost else _MOST)

    def _tell(self, problem: str) -> None:
        reported, self._reported = self._reported, True
        if self._report is not None and not reported:
            self._report(self._name, problem)

    def _pump(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held)  # no deadline: in a daemon thread
                piece = bytes(self._held[:_PIECE])
            piece = piece[: piece.rfind(b"\n") + 1] or piece
            problem, written = "", 0
            try:
                written = os.write(self._descriptor, piece)  # no deadline: in a daemon thread
            except OSError as error:
                problem = error.strerror or str(error)
            with self._changed:
                del self._held[:written]
                self._fails = bool(problem)
                self._waits = self._waits or (not problem and self._report is not None)
                self._reported = self._reported and bool(self._held)
                self._changed.notify_all()
            if problem:
                self._tell(problem)
                time.sleep(_RETRY)


class _File(Outlet):
    """A file that is appended to; closing it first writes the held text."""

    def close(self) -> None:
        if not self.closed:
            self.drain()
            super().close()
            os.close(self._descriptor)


def append(path: str, report: Report) -> Outlet:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)  # no deadline: at the start of the job
    return _File(descriptor, path, report)


@contextmanager
def unblocked(*names: str, report: Report | None = None) -> Iterator[None]:
    """Replace ``stdout`` or ``stderr`` by outlets, which never fail and never block for long."""
    before = {}
    for name in names:
        stream = getattr(sys, name)
        try:
            stream.flush()  # no deadline: at the start of the job
            outlet = Outlet(stream.fileno(), name, report, stream.encoding)
        except (AttributeError, OSError, ValueError):
            continue  # it has no descriptor, as in a notebook
        before[name] = stream
        setattr(sys, name, outlet)
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).drain()
            setattr(sys, name, stream)
