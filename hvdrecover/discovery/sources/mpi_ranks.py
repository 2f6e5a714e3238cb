"""A program that ``mpirun`` starts to learn where ranks run: rank 0 prints the host of each."""

from __future__ import annotations

import json
import sys

MARK = "hvdrecover: ranks are on "


def main() -> None:
    """Gather the names of all ranks' hosts, and print them."""
    from mpi4py import MPI  # initialises MPI

    hosts = MPI.COMM_WORLD.gather(MPI.Get_processor_name())
    if hosts is not None:  # rank 0
        # In a line of its own, whatever has been printed before.
        sys.stdout.write(f"\n{MARK}{json.dumps(hosts)}\n")


if __name__ == "__main__":
    main()
