"""Three ranks, to one of which happens what Gloo takes for the end, or does not notice, without our edits.

::

    hvdrecover run -np 3 -- python lost_peer.py FOLDER

First rank 2 sends rank 0 a message that it doesn't wait for. Then rank 2 is lost while rank 0 has a part of a
message from it. Each rank writes its process id into ``FOLDER/starts-RANK`` whenever it starts to train.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

import hvdrecover.torch as recover

ROWS = 1 << 25  # of rank 2, the last one: far more bytes than fit between two processes
VALUE = 7.0
# Of Gloo's messages: bytes with this head, kind, slot, offset, bytes without it, offset at the receiver.
UNEXPECTED = struct.pack("=6Q", 48 + 8, 1, 1 << 60, 0, 8, 0)


def connections() -> Iterator[socket.socket]:
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is not connected, or was that of the folder
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if connection.family == socket.AF_INET and connection.getpeername():
                        yield connection


def send_what_nobody_waits_for(folder: Path) -> None:
    """Rank 2 sends a message by each of its connections to rank 0; returns by an exception."""
    if hvd.rank() == 0:
        names = [str(each.getsockname()) for each in connections()]
        (folder / "names").write_text("\n".join(names))
    hvd.barrier()
    if hvd.rank() == 2:
        (folder / "sent").touch()
        names = (folder / "names").read_text().split("\n")
        for each in connections():
            if str(each.getpeername()) in names:
                each.send(UNEXPECTED)
    while True:
        hvd.allreduce(torch.ones(1), name="after")


def lose_a_rank(folder: Path) -> None:
    """Start two collectives at once, until rank 2 is lost in the first; returns by an exception."""
    pids = hvd.allgather(torch.tensor([os.getpid()]), name="pids")
    mine = torch.full((ROWS if hvd.rank() == 2 else 1,), VALUE)
    while True:
        first = hvd.allgather_async(mine, name="first")
        second = hvd.allgather_async(torch.ones(1), name="second")
        if hvd.rank() == 0:
            kill_in_the_middle(int(pids[2]), mpi_ops._handle_map[first][-1], folder)
        hvd.synchronize(first)
        hvd.synchronize(second)


def kill_in_the_middle(process: int, result: Any, folder: Path) -> None:
    """SIGKILL rank 2 when some of its rows, but not all, have come; do nothing if all have."""
    while result.untyped_storage().nbytes() < result.element_size() * (ROWS + 2) or result[2] != VALUE:
        pass  # Horovod's thread makes it, and fills it
    os.kill(process, signal.SIGSTOP)
    if result[-1] == VALUE:
        os.kill(process, signal.SIGCONT)
    else:
        (folder / "lost").touch()
        os.kill(process, signal.SIGKILL)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    hvd.init()
    state = recover.TorchState(step=0)

    @recover.run
    def train(state: recover.TorchState) -> None:
        with (folder / f"starts-{hvd.rank()}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        state.commit()
        if not (folder / "sent").exists():
            send_what_nobody_waits_for(folder)
        if not (folder / "lost").exists():
            lose_a_rank(folder)

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
