"""A rank is lost right before a commit, and the other knows it when it begins the commit.

::

    hvdrecover run -np 2 -- python late_notice.py FOLDER

Rank 0 writes into ``FOLDER`` from which step it continued, each time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

import hvdrecover.torch as recover

STEPS, LOST_AT, PROBES = 6, 4, 2000


def is_told_of_the_loss() -> None:
    """Wait until Horovod has nothing more to do with the lost rank."""
    try:
        probes = [hvd.allreduce_async(torch.ones(1), name=f"probe {number}") for number in range(PROBES)]
        hvd.synchronize(probes[0])
    except HorovodInternalError:
        return  # while Horovod's own thread still has most of them before it, unless it was quick
    raise AssertionError("the other rank is still there")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    hvd.init()
    state = recover.TorchState(step=0)

    @recover.run
    def train(state: recover.TorchState) -> None:
        if hvd.rank() == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{state.step}\n")
        while state.step < STEPS:
            hvd.allreduce(torch.ones(1), name="gradient")
            state.step += 1
            if state.step == LOST_AT and not (folder / "lost").exists():
                if hvd.rank() == 1:
                    (folder / "lost").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                is_told_of_the_loss()
            state.commit()

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
