"""Every way in which the steps of two threads can follow each other, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from hvdrecover.checkpoint.storage import Storage

_TIMEOUT = 30.0  # seconds until a step counts as hung


class Thread:
    """A function whose every call of its storage waits until it is given its turn.

    Attributes:
        result: what the function returned or raised, once it is done.
    """

    def __init__(self, function: Callable[[Any], Any], storage: Storage) -> None:
        self.result: Any = None
        self.done = False
        self._turn = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._storage = storage
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._until_it_waits()

    def step(self) -> None:
        """Let it make its next call, and come to the one after that or to its end."""
        self._turn.release()
        self._until_it_waits()

    def _until_it_waits(self) -> None:
        assert self._waits.acquire(timeout=_TIMEOUT), "a step hangs"

    def _run(self) -> None:
        try:
            self.result = self._function(self)
        except Exception as error:
            self.result = error
        self.done = True
        self._waits.release()

    @property
    def url(self) -> str:
        return self._storage.url

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._storage, name)

        def wait_and_call(*args: Any) -> Any:
            self._waits.release()
            assert self._turn.acquire(timeout=_TIMEOUT), "no turn was given"
            return call(*args)

        return wait_and_call


def every_order(start: Callable[[], list[Thread]]) -> Iterator[list[Thread]]:
    """Run threads to their ends in every order of their steps.

    Args:
        start: makes fresh threads over a fresh storage; called once for each order.
    """
    plan: list[int] = []  # which of the threads that could continue, at each step; then always the first
    while True:
        threads, choices = start(), []
        while waiting := [thread for thread in threads if not thread.done]:
            number = plan[len(choices)] if len(choices) < len(plan) else 0
            choices.append((number, len(waiting)))
            waiting[number].step()
        yield threads
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return
        plan = [number for number, _ in choices[:-1]] + [choices[-1][0] + 1]
