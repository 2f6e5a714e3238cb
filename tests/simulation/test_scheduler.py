"""The simulator itself: order, time, death and repetition."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.simulation.scheduler import Event, Lock, Process, Scheduler
from tests.simulation.simulate import run_seed
from tests.simulation.system import Running, System

ROOT = Path(__file__).parents[2]


def test_processes_that_wait_for_each_other_are_found() -> None:
    scheduler = Scheduler(1)
    process = Process(scheduler, "p", "h")
    first, second = Lock(scheduler), Lock(scheduler)

    def take(one: Lock, other: Lock) -> None:
        with one:
            scheduler.sleep(1.0)
            with other:
                pass

    scheduler.start(process, "a", lambda: take(first, second))
    scheduler.start(process, "b", lambda: take(second, first))
    scheduler.run()
    assert scheduler.failure is not None
    assert scheduler.failure.startswith("all wait for each other")


def test_a_dead_process_has_no_further_effect() -> None:
    scheduler = Scheduler(1)
    victim, killer = Process(scheduler, "victim", "h"), Process(scheduler, "killer", "h")
    done: list[str] = []
    event = Event(scheduler)

    def live() -> None:
        try:
            scheduler.sleep(10.0)
            done.append("after its death")
        finally:
            event.set()  # raises: the process is dead
            done.append("in its finally block")

    scheduler.start(victim, "main", live)
    scheduler.start(killer, "main", lambda: (scheduler.sleep(1.0), scheduler.kill(victim)))
    scheduler.run()
    assert (done, event.is_set(), scheduler.failure) == ([], False, None)


def test_a_host_that_is_cut_off_gets_what_was_sent_when_it_is_back_in_time() -> None:
    scheduler = Scheduler(1)
    system = System(scheduler)
    one, other = Running(scheduler, "one", "h1"), Running(scheduler, "other", "h2")
    received: list[bytes] = []

    def serve(process: Running) -> int:
        listener = system.modules()[socket]["create_server"](("", 0))
        scheduler.wait(lambda: listener.is_readable)
        end, _ = listener.accept()
        for _ in range(2):
            scheduler.wait(lambda: end.is_readable)
            received.append(end.recv(9))
        return 0

    def call(process: Running) -> int:
        scheduler.sleep(1.0)
        end = system.modules()[socket]["create_connection"](("h1", 1), timeout=5.0)
        system.cut("h2", lambda: 10.0)
        end.sendall(b"late")
        system.later(5.0, lambda: system.join("h2"))
        scheduler.sleep(8.0)
        system.cut("h2", lambda: 10.0)
        end.sendall(b"lost")
        scheduler.sleep(60.0)
        return 0

    system.spawn(one, serve)
    system.spawn(other, call)
    scheduler.run()
    assert received == [b"late", b""]
    assert scheduler.failure is None


def test_another_python_process_prints_the_same_transcript() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "7"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert printed[0] == printed[1] == f"{run_seed(7).report()}\n".encode()
