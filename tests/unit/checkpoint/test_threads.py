"""Threads for transfers: what they return, raise and leave undone, and that they hold up no exit."""

import gc
import queue
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from hvdrecover.checkpoint.storage.threads import Threads

TIMEOUT = 30  # seconds; never reached unless something is broken

HANGING = """
import threading
import numpy as np
from hvdrecover.checkpoint.storage.direct import PIECE, _transferred
from hvdrecover.checkpoint.storage.pieces import transferred

begun = threading.Semaphore(0)

def hang(piece, at):
    begun.release()
    threading.Event().wait()

def run(pieces):
    for _ in pieces:
        pass

buffer = np.zeros(4 * PIECE, np.uint8)
for pieces in transferred(buffer, PIECE, 2, hang), _transferred(buffer, PIECE, 2, hang):
    threading.Thread(target=run, args=(pieces,), daemon=True).start()
for _ in range(4):
    begun.acquire()
print("the program ends")
"""


def test_results_and_errors_are_the_functions_own():
    with Threads(2, "test") as threads:
        results = [threads.submit(pow, 2, exponent) for exponent in range(10)]
        failing = threads.submit(int, "no number")
        assert [result.result() for result in results] == [2**exponent for exponent in range(10)]
        with pytest.raises(ValueError, match="no number"):
            failing.result()


def test_no_more_run_at_a_time_than_said():
    together = threading.Barrier(3)
    with Threads(2, "test") as threads:
        for _ in range(3):
            threads.submit(together.wait, TIMEOUT)
        assert len([thread for thread in threading.enumerate() if thread.name == "test"]) == 2
        together.abort()


def test_an_error_leaves_undone_what_has_not_begun_and_waits_for_what_has(monkeypatch):
    begun, go = threading.Event(), threading.Event()
    ended = []

    def work():
        begun.set()
        assert go.wait(TIMEOUT)
        ended.append("the first")

    with pytest.raises(ZeroDivisionError), Threads(1, "test") as threads:
        threads.submit(work)
        threads.submit(ended.append, "the second")
        assert begun.wait(TIMEOUT)
        (thread,) = threads._threads
        monkeypatch.setattr(thread, "join", lambda: go.set() or threading.Thread.join(thread))
        raise ZeroDivisionError
    assert ended == ["the first"]


class Contested(queue.SimpleQueue):
    """A queue whose last task is taken by a thread right after somebody has seen it there."""

    def __init__(self):
        super().__init__()
        self.taken, self.let_go = threading.Event(), threading.Event()

    def get(self, *args, **named):
        task = super().get(*args, **named)
        if threading.current_thread().name == "test" and task is not None:
            if self.let_go.is_set():
                self.taken.set()
            assert self.let_go.wait(TIMEOUT)
        return task

    def empty(self):
        is_empty = super().empty()
        self.contest()
        return is_empty

    def get_nowait(self):
        self.contest()
        return super().get_nowait()

    def contest(self):
        if not self.let_go.is_set():
            self.let_go.set()
            assert self.taken.wait(TIMEOUT)


def test_a_task_that_a_thread_takes_at_the_last_moment_holds_up_nobody():
    ended = threading.Event()

    def block():
        with Threads(1, "test") as threads:
            threads._tasks = Contested()
            threads.submit(len, "first")
            threads.submit(len, "second")
        ended.set()

    threading.Thread(target=block, daemon=True).start()
    assert ended.wait(TIMEOUT)


def test_an_argument_is_let_go_when_its_function_has_returned():
    gc.disable()
    try:
        buffer = np.zeros(8, np.uint8)
        gone = threading.Event()
        weakref.finalize(buffer, gone.set)
        with Threads(1, "test") as threads:
            threads.submit(len, buffer).result()
            del buffer
            assert gone.wait(TIMEOUT)
    finally:
        gc.enable()


def test_transfers_that_hang_do_not_keep_a_process_from_exiting():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("the program ends\n", "", 0)
