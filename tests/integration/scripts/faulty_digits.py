"""The digits example with faults in it: the lines of FAULTS, one after the other, each once in all processes.

A line is ``WHAT PLACE RANK COMMIT``: what happens, where, to which rank (-1 is any), at which commit or after
it. The places are ``start`` (of the process) and ``step``; ``repair_faults.py`` adds more. The folder
FAULTS_STRUCK remembers which have struck. A rank that is to hold waits for a file ``open`` beside it.
Under the folder FAULTS_NEAR, if there is one, each host has a near tier of its own.
"""

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hvdrecover.examples.ledger import Ledger

FAULTS = [line.split() for line in os.environ["FAULTS"].splitlines()]
STRUCK = Path(os.environ["FAULTS_STRUCK"])
if "FAULTS_NEAR" in os.environ:  # the hosts of a lab share their files
    os.environ["HVDRECOVER_NEAR"] = os.environ["FAULTS_NEAR"] + "/" + os.environ["HOROVOD_HOSTNAME"]


def hang_in_a_loop():
    while True:  # the hang is here; it leaves the processors to other tests
        time.sleep(0.01)


def hang_in_a_deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the deadlock is here


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_soon():
    threading.Timer(0.03, be_killed).start()


def be_killed_late():
    threading.Timer(0.3, be_killed).start()


def fail():
    raise RuntimeError("the script is wrong")


def leave_early():
    os._exit(0)


def hold():
    while not STRUCK.with_name("open").exists():
        time.sleep(0.02)


def be_hungry():
    Path(os.environ["FAULTS_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    bytearray(1 << 30)[:: 1 << 12] = b"x" * (1 << 18)  # touches every page of it


WHAT = {
    "loop": hang_in_a_loop,
    "deadlock": hang_in_a_deadlock,
    "kill": be_killed,
    "kill-soon": be_killed_soon,
    "kill-late": be_killed_late,
    "abort": os.abort,  # as an exception does that nobody catches in C++
    "fail": fail,
    "fail-always": fail,
    "leave": leave_early,
    "hunger": be_hungry,
    "hold": hold,  # for a test that does something else before the run ends
}


def strike(place, rank, commit):
    """Let the next fault strike, if it is of this place."""
    struck = len(list(STRUCK.iterdir()))
    if struck == len(FAULTS):
        return
    what, where, whom, when = FAULTS[struck]
    if where != place or int(whom) not in (rank, -1) or commit < int(when):
        return
    if what != "fail-always":
        try:
            (STRUCK / str(struck)).touch(exist_ok=False)
        except FileExistsError:
            return
    WHAT[what]()


def batch(ledger, rank, size, indices):
    strike("step", rank, ledger._state.last_commit.commit)
    record(ledger, rank, size, indices)


record = Ledger.batch


def main():
    STRUCK.mkdir(exist_ok=True)
    Ledger.batch = batch
    framework = sys.argv.pop(1)
    strike("start", -1, 0)
    importlib.import_module(f"hvdrecover.examples.{framework}_digits").main()


if __name__ == "__main__":
    main()
