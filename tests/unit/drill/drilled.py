"""A run for faults to strike, of real child processes that count."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hvdrecover.drill.faults import Switchable
from tests.unit.launch.children import child, line

COUNT = """
import signal, sys, time
number = 0
while True:
    number += 1
    open(sys.argv[1], "w").write(str(number))
    if number == 1:
        print("counting", flush=True)
    time.sleep(0.002)
"""


class Counting:
    """A run whose "ranks" count in files, and whose supervisor and launcher do, too.

    Attributes:
        orders: what was asked of ranks.
        starts: how often it was started again.
        well: what it says of its hosts; not, when one was repaired.
    """

    def __init__(self, folder: Path, stack: ExitStack, ranks: int = 2) -> None:
        self.folder = folder
        self.root = folder / "checkpoint"
        self.data: Path | None = None
        self.hosts: Sequence[Switchable] = ()
        self.slots: Sequence[str] = [f"localhost:{ranks}"]
        self.well = True
        self.names_hosts = False
        self.resizes = False
        self.size = ranks
        self.orders: list[tuple[int, str]] = []
        self.starts = 0
        names = [*map(str, range(ranks)), "supervisor", "launcher"]
        self.children: dict[str, subprocess.Popen[str]] = {
            name: stack.enter_context(child(COUNT, str(folder / name))) for name in names
        }
        for each in self.children.values():
            assert line(each) == "counting"

    def count(self, name: str) -> int:
        """Return how far a process has counted; 0 while it writes."""
        return int((self.folder / name).read_text() or 0)

    def alive(self) -> list[str]:
        """The processes that have not been waited for, and still run."""
        return [name for name, each in self.children.items() if each.poll() is None]

    def ranks(self) -> list[int]:
        return list(range(self.size))

    def process_of(self, rank: int) -> int:
        return self.children[str(rank)].pid

    def guardian_of(self, rank: int) -> int:
        raise AssertionError("no fault strikes guardians")

    def supervisor(self) -> int:
        return self.children["supervisor"].pid

    def launcher(self) -> int:
        return self.children["launcher"].pid

    def order(self, rank: int, what: str) -> None:
        self.orders.append((rank, what))

    def repaired(self) -> None:
        self.well = False

    def hosts_are_well(self) -> bool:
        return self.well

    def start_again(self) -> None:
        self.children["supervisor"].wait()
        self.starts += 1
