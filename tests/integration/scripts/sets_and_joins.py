"""Process sets and ``hvd.join()`` in a job that loses ranks.

::

    hvdrecover run -np 2 -- python sets_and_joins.py FOLDER [commit]

Rank 1 is lost in two steps with process sets, and then while rank 0 has joined. In the first step, rank 0
uses its process set only when Horovod's library has ended and forgotten it. Each rank writes its process
id to ``FOLDER/starts-RANK`` whenever it starts to train. With ``commit``, rank 1 commits while rank 0 has
joined.
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


def lose_once(name: str, folder: Path) -> None:
    if hvd.rank() == 1 and not (folder / name).exists():
        (folder / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, *, commits: bool) -> None:
    torch.set_num_threads(1)
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets)
    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
    state = recover.TorchState(step=0, sums=[])

    @recover.run
    def train(state: recover.TorchState) -> None:
        with (folder / f"starts-{hvd.rank()}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while state.step < 4:
            if state.step == 1:
                lose_once("lost-before-a-set", folder)
                if hvd.rank() == 0 and not (folder / "waited").exists():
                    (folder / "waited").touch()
                    while library.horovod_number_of_process_sets() > 1:
                        time.sleep(0.01)
            elif state.step == 2:
                lose_once("lost-in-a-set", folder)
            own = sets[hvd.rank()]
            alone = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own, name="alone")
            state.sums.append(hvd.allreduce(alone, op=hvd.Sum, name="both").item())
            state.step += 1
            state.commit()
        for batch in range(2 + 2 * hvd.rank()):  # rank 1 has more
            if hvd.rank() == 1 and batch == 3:
                lose_once("lost-in-a-join", folder)
            hvd.allreduce(torch.ones(1), name="uneven")
            if commits and batch >= 2:
                state.commit()
        assert hvd.join() == 1
        state.commit()

    train(state)
    (folder / f"sums-{hvd.rank()}").write_text(str(state.sums))


if __name__ == "__main__":
    main(Path(sys.argv[1]), commits="commit" in sys.argv)
