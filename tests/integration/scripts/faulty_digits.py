"""The digits example with faults in it: the lines of FAULTS, one after the other, each once in all processes.

A line is ``WHAT PLACE RANK COMMIT``: what happens, where, to which rank (-1 is any), at which commit or after
it. The places are ``start`` (of the process) and ``step``; ``repair_faults.py`` adds more. The folder
FAULTS_STRUCK remembers which have struck. A rank that is to hold waits for a file beside it: ``open-0`` for
the first line of FAULTS, and so on. Under the folder FAULTS_NEAR, if there is one, each host has a near tier
of its own. By a word ``EPOCH:SIZE`` of SIZES, from that epoch on the ranks make one commit after the other
until they have been so many: hosts come and go at commits.
"""

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hvdrecover.examples.digits import Ledger

FAULTS = [line.split() for line in os.environ["FAULTS"].splitlines()]
STRUCK = Path(os.environ["FAULTS_STRUCK"])
SIZES = [tuple(map(int, word.split(":"))) for word in os.environ.get("SIZES", "").split()]
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


def hold(number):
    while not STRUCK.with_name(f"open-{number}").exists():
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
    "leave": leave_early,
    "hunger": be_hungry,
}


def strike(place, rank, commit):
    """Let the next fault strike, if it is of this place."""
    struck = len(list(STRUCK.iterdir()))
    if struck == len(FAULTS):
        return
    what, where, whom, when = FAULTS[struck]
    if where != place or int(whom) not in (rank, -1) or commit < int(when):
        return
    try:
        (STRUCK / str(struck)).touch(exist_ok=False)
    except FileExistsError:
        return
    if what == "hold":  # for a test that does something else before the run ends
        hold(struck)
    else:
        WHAT[what]()


def batch(ledger, rank, size, indices):
    strike("step", rank, ledger._state.last_commit.commit)
    record(ledger, rank, size, indices)


record = Ledger.batch


def await_sizes(example, state_class):
    """Have commits be repeated until the ranks have been as many as SIZES says."""
    commit = state_class.commit
    seen = set()  # sizes: all ranks know the same of those that are waited for, as they have met

    def commit_until_all_were_seen(state, durable=False):
        seen.add(example.hvd.size())  # before the commit: at it, other hosts may have joined already
        commit(state, durable)
        while any(epoch <= state.epoch and size not in seen for epoch, size in SIZES):
            time.sleep(0.05)
            commit(state)

    state_class.commit = commit_until_all_were_seen


def main():
    STRUCK.mkdir(exist_ok=True)
    Ledger.batch = batch
    framework = sys.argv.pop(1)
    strike("start", -1, 0)
    example = importlib.import_module(f"hvdrecover.examples.{framework}_digits")
    if SIZES:
        name = "TorchState" if framework == "torch" else "TensorFlowKerasState"
        await_sizes(example, getattr(example.recover, name))
    example.main()


if __name__ == "__main__":
    main()
