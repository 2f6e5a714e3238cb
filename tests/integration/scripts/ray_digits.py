"""The digits example as a function that `hvdrecover.ray.run` runs; prints what comes back to the driver.

Arguments are the example's. ``SLOTS`` are the numbers of processes, to start with and at most; ``OPTIONS``
are more options of `hvdrecover run`; ``FAIL_AFTER`` is the commit after which rank 1 fails for good.
"""

from __future__ import annotations

import functools
import os
import sys

import ray

import hvdrecover.ray


class MineError(Exception):
    """An error of the script's own."""


def train(arguments: list[str], fail_after: int | None) -> tuple[int, int, int]:
    """Train, and return the rank, the number of ranks, and the process."""
    import horovod.torch as hvd

    from hvdrecover.examples import torch_digits
    from hvdrecover.examples.ledger import Ledger

    write = Ledger.batch

    def fail(ledger: Ledger, rank: int, *rest: object) -> None:
        if rank == 1 and fail_after is not None and ledger._state.last_commit.commit >= fail_after:
            raise MineError("no more", fail_after)
        write(ledger, rank, *rest)

    Ledger.batch = fail
    torch_digits.main(arguments)
    return hvd.rank(), hvd.size(), os.getpid()


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    processes, most = map(int, os.environ.get("SLOTS", "2 2").split())
    after = os.environ.get("FAIL_AFTER")
    job = functools.partial(train, sys.argv[1:], int(after) if after else None)
    try:
        result = hvdrecover.ray.run(
            job,
            processes,
            least=1,
            most=most,
            timeout=120,
            options=os.environ.get("OPTIONS", "--no-standby").split(),
        )
        print("returned", result, flush=True)
    except MineError as error:
        print("raised", error.args, "which", "Traceback" in str(error.__cause__), flush=True)
