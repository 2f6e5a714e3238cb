"""The digits example, which continues only when a test has done what is to come before.

A rank that has begun a batch after a commit of GATES waits there for a file of that number in GATES_OPEN.
By a word ``EPOCH:SIZE`` of SIZES, from that epoch on the ranks make one commit after the other until they
have been so many: hosts come and go at commits.
"""

import importlib
import os
import sys
import time
from pathlib import Path

from hvdrecover.examples.ledger import Ledger

GATES = [int(commit) for commit in os.environ["GATES"].split()]
OPEN = Path(os.environ["GATES_OPEN"])
SIZES = [tuple(map(int, word.split(":"))) for word in os.environ["SIZES"].split()]

begin = Ledger.batch
seen = set()  # sizes: all ranks know the same of those that are waited for, as they have met


def begin_and_wait(ledger, rank, size, indices):
    begin(ledger, rank, size, indices)
    last = ledger._state.last_commit.commit
    while any(gate <= last and not (OPEN / str(gate)).exists() for gate in GATES):
        time.sleep(0.02)


def commit_until_all_were_seen(state, durable=False):
    seen.add(example.hvd.size())  # before the commit: at it, other hosts may have joined already
    commit(state, durable)
    while any(epoch <= state.epoch and size not in seen for epoch, size in SIZES):
        time.sleep(0.05)
        commit(state)


if __name__ == "__main__":
    framework = sys.argv.pop(1)
    example = importlib.import_module(f"hvdrecover.examples.{framework}_digits")
    State = example.recover.TorchState if framework == "torch" else example.recover.TensorFlowKerasState
    commit = State.commit
    Ledger.batch, State.commit = begin_and_wait, commit_until_all_were_seen
    example.main()
