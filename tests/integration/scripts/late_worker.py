"""A job to which a worker comes that takes long to import its libraries, longer than Gloo waits for anybody.

::

    HOSTS=FILE hvdrecover run -np N --discover "file FILE" -- python late_worker.py FOLDER

Rank 0 writes ``localhost:SLOTS`` into the file, with one slot more than there are. Each process writes its id
into ``FOLDER/RANK`` as soon as it starts, with the rank that it is given then. If ``LOST=1``, the one that
comes kills rank 1 while that waits for it. All begin with a broadcast, in which nobody takes part later.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

HOSTS = Path(os.environ["HOSTS"])
IMPORTS = 2 * float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"])  # seconds


def started(folder: Path) -> list[int]:
    path = folder / "1"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def come_late(folder: Path) -> None:
    """Take one's time, once; and perhaps kill another one meanwhile, and see it start again."""
    if (folder / "came").exists() or not (folder / "asked").exists():
        return
    (folder / "came").touch()
    time.sleep(IMPORTS)
    if os.environ.get("LOST") == "1":
        lost = started(folder)
        os.kill(lost[-1], signal.SIGKILL)
        while started(folder) == lost:
            time.sleep(0.05)
        time.sleep(IMPORTS)  # it asks for its place again


def main(folder: Path) -> None:
    with (folder / os.environ["HOROVOD_RANK"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    come_late(folder)
    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Linear(1, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    state = recover.TorchState(model, step=0, sizes=[])

    @recover.run
    def train(state: recover.TorchState) -> None:
        first = state.sizes[0] if state.sizes else hvd.size()
        while len(state.sizes) < 3 or state.sizes[-3] == first:
            hvd.allreduce(torch.ones(1), name="step")
            state.sizes.append(hvd.size())
            if hvd.rank() == 0 and not (folder / "asked").exists():
                (folder / "asked").touch()
                HOSTS.write_text(f"localhost:{first + 1}\n")
            state.commit()
            time.sleep(0.05)

    train(state)
    if hvd.rank() == 0:
        (folder / "sizes").write_text(" ".join(map(str, sorted(set(state.sizes)))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
