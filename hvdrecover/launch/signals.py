"""An event loop that waits for signals and files."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterable
from types import FrameType


class Waking:
    """Waits for signals, and for files in its selector. Their ``data`` is the function to call."""

    def __init__(self, signals: Iterable[int]) -> None:
        self.selector = selectors.DefaultSelector()
        self._wanted = set(signals)
        self._noted: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Waking:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self._reader, selectors.EVENT_READ, lambda: os.read(self._reader, 4096))
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in self._wanted}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        self.selector.close()
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> list[int]:
        """Wait at most this long, call the functions of readable files, and return the received signals."""
        for key, _ in self.selector.select(seconds):
            key.data()
        noted = self._noted.copy()
        del self._noted[: len(noted)]
        return noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
