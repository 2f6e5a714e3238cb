"""Threads for transfers that may hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """A few threads that run functions, as long as the ``with`` block lasts.

    Python waits for the threads of a `concurrent.futures.ThreadPoolExecutor` before it exits, so that storage
    that hangs would hold up a process that has nothing left to do. It does not wait for these.

    Args:
        count: how many functions may run at a time.
        name: what the threads are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run a function when a thread is free."""
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(task)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        """Forget what has not begun, and wait for what has."""
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()  # a thread may have taken the last one since any look
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds a part of the buffer
