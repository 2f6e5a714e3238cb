"""Runs the digits example by `hvdrecover_ray.run`, and prints its result or error.

The arguments are the example's. Variables: ``SLOTS`` has the numbers of processes, at the start and at most;
``OPTIONS`` has more options of `hvdrecover run`; after the commit ``FAIL_AFTER``, rank 1 raises an error.
"""

from __future__ import annotations

import functools
import os
import sys

import ray

import hvdrecover_ray


class MineError(Exception):
    """An error that only this script defines."""


def train(arguments: list[str], fail_after: int | None) -> tuple[int, int, int]:
    """Train, and return rank, number of ranks and process id."""
    import horovod.torch as hvd

    from hvdrecover.examples import torch_digits
    from hvdrecover.examples.digits import Ledger

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
        result = hvdrecover_ray.run(
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
