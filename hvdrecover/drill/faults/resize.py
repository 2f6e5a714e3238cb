"""Changes of the number of ranks: hosts leave and come, all of which are names of this one."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdrecover.drill.faults.fault import Drilled, Plain


@dataclass(frozen=True)
class Resize(Plain):
    """Hosts leave or come, so that the run has another number of ranks, from 1 to that of its start.

    Those that have been there longest leave, with rank 0 among them. No step is lost.
    """

    name: ClassVar[str] = "resize"
    summary: ClassVar[str] = "hosts leave or come, and the number of ranks is another"

    def lacks(self, run: Drilled) -> str:
        """Return whether the number of ranks may change."""
        if not run.resizes:
            return "virtual ranks, which have one result on any number of ranks; --resize says that there are"
        if run.names_hosts or run.hosts:
            return "the drill's own host discovery; leave out -H, --lab and the like"
        return "" if run.size > 1 else "more ranks; start the drill with -np 2 or more"

    def prepare(self, run: Drilled) -> dict[str, str]:
        """List all hosts."""
        self._list(run, _names(run.size))
        return {}

    def options(self, run: Drilled) -> list[str]:
        """Have hosts discovered in the list."""
        words = ["file", "--cache", os.fspath(run.folder / "hosts"), os.fspath(_listing(run))]
        sizes = ["--min-np", "1", "--max-np", str(run.size)]
        return ["--discover", shlex.join(words), "--network-interface", "lo", *sizes]

    def strike(self, run: Drilled, rank: int) -> None:
        """Have another number of hosts; which one, of those that are possible, the rank decides."""
        present = [line.rpartition(":")[0] for line in _listing(run).read_text().splitlines()]
        sizes = [size for size in range(1, run.size + 1) if size != len(present)]
        size = sizes[rank % len(sizes)]
        others = [name for name in _names(run.size) if name not in present]
        self._list(run, present[-size:] if size < len(present) else [*present, *others][:size])

    def _list(self, run: Drilled, names: list[str]) -> None:
        path = _listing(run).with_suffix(".new")
        path.write_text("".join(f"{name}:1\n" for name in names))
        path.rename(_listing(run))


def _listing(run: Drilled) -> Path:
    return run.folder / "resized.txt"


def _names(count: int) -> list[str]:
    """Return names of this host; to Horovod each is another host. Numbers may begin with zeros."""
    return [f"127.{'0' * number}1" for number in range(count)]
