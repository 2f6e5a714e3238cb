"""``python -m hvdrecover.doctor.ranks BY SECONDS``: one rank of the test of allreduce.

``BY`` is what sums: ``torch`` or ``tensorflow``, through Horovod, or ``mpi4py``. Each rank writes lines of
JSON behind `MARK`: what it has imported, before the rendezvous, and what it has found.

Rank ``r`` of ``n`` puts ``i mod 251 + r + 1`` into element ``i``, so each element of the sum is the whole
number ``n * (i mod 251) + n * (n + 1) / 2``. Up to `MOST_RANKS` ranks, that and all partial sums are less
than 2**24, which float32 holds exactly, whatever the order of summing.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover import config
from hvdrecover.checkpoint.digest import digest
from hvdrecover.launch.launcher import output_is_closed

MARK = "hvdrecover-rank:"
SIZES = (1 << 12, 1 << 24)  # bytes: the first tells the latency, the last the bandwidth
MOST_RANKS = 5000
_REPETITIONS = 7
_PERIOD = 251  # prime, so that no chunk of a ring repeats another one
_LOOK = 0.5  # seconds between looks at whether anybody reads what this process prints

Values = npt.NDArray[np.float32]
Allreduce = Callable[[Values], Values]


def contribution(rank: int, count: int) -> Values:
    """Return what a rank adds: float32 of shape ``[count]``."""
    return (np.arange(count, dtype=np.int64) % _PERIOD + rank + 1).astype(np.float32)


def expected(size: int, count: int) -> Values:
    """The sum over ``size`` ranks: float32 of shape ``[count]``."""
    each = size * (np.arange(count, dtype=np.int64) % _PERIOD) + size * (size + 1) // 2
    return each.astype(np.float32)


def measure(allreduce: Allreduce, rank: int, size: int, nbytes: int) -> dict[str, Any]:
    """Sum over all ranks, compare each element, and take the time.

    Args:
        allreduce: returns the sum over all ranks of a float32 array of shape ``[nbytes / 4]``.
        rank: this process's.
        size: number of ranks.
        nbytes: how much to sum.

    Returns:
        ``bytes``; ``seconds``, the median of several; ``wrong``, the number of elements that differ from what
        they must be; ``first_wrong``, the first one's index and the values that it has and should have, or
        None; ``digest`` of the sum.
    """
    mine, right = contribution(rank, nbytes // 4), expected(size, nbytes // 4)
    total, times = allreduce(mine), []  # the first is slower: connections and buffers are made
    differing = np.flatnonzero(total != right)
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        allreduce(mine)
        times.append(time.perf_counter() - began)
    first = int(differing[0]) if len(differing) else None
    return {
        "bytes": nbytes,
        "seconds": statistics.median(times),
        "wrong": len(differing),
        "first_wrong": None if first is None else [first, float(total[first]), float(right[first])],
        "digest": digest(total),
    }


def say(**facts: Any) -> None:
    """Tell the doctor, in one write, as other ranks print to the same place."""
    os.write(1, f"\n{MARK}{json.dumps(facts)}\n".encode())


def main() -> None:
    """Take part."""
    by, seconds = sys.argv[1], float(sys.argv[2])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # whatever happens
    threading.Thread(target=_end_when_alone, daemon=True).start()
    (_mpi4py if by == "mpi4py" else _horovod)(by)


def _horovod(framework: str) -> None:
    config.quiet_tensorflow()
    hvd = importlib.import_module(f"horovod.{framework}")
    module = importlib.import_module(framework)
    built = {name: bool(getattr(hvd, f"{name}_built")()) for name in ("gloo", "mpi", "nccl", "cuda")}
    say(kind="imported", by=framework, host=config.read().host, built=built)
    hvd.init()
    tensor = module.from_numpy if framework == "torch" else module.constant

    def allreduce(values: Values) -> Values:
        total: Values = hvd.allreduce(tensor(values), op=hvd.Sum, name="hvdrecover.doctor").numpy()
        return total

    _sum(framework, allreduce, hvd.rank(), hvd.size())
    hvd.shutdown()


def _mpi4py(by: str) -> None:
    module = importlib.import_module("mpi4py.MPI")
    world = module.COMM_WORLD
    say(kind="imported", by=by, host=config.read().host, library=module.Get_library_version().split(",")[0])

    def allreduce(values: Values) -> Values:
        total = np.empty_like(values)
        world.Allreduce(values, total, op=module.SUM)
        return total

    _sum(by, allreduce, world.Get_rank(), world.Get_size())


def _sum(by: str, allreduce: Allreduce, rank: int, size: int) -> None:
    sums = [measure(allreduce, rank, size, nbytes) for nbytes in SIZES]
    say(kind="summed", by=by, host=config.read().host, rank=rank, size=size, sums=sums)


def _end_when_alone() -> None:
    """End this process when its launcher is gone: a broken ssh connection ends nothing by itself."""
    while not output_is_closed():
        time.sleep(_LOOK)
    os._exit(1)


if __name__ == "__main__":
    main()
