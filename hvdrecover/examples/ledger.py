"""A record of which samples were trained on after which commit, to check that none is lost or seen twice.

Each process appends a line of JSON per batch to a file of its own. `committed` then says which batches are
part of the final state: a batch trained after commit ``k`` of generation ``g`` is lost if a later generation
resumed from commit ``k`` or an earlier one.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdrecover.elastic.state import State


@dataclass(frozen=True)
class Batch:
    """One rank's part of one training step.

    Attributes:
        time: when it was done, in seconds since the Unix epoch.
        pid: the process that did it.
        rank: its rank, or the virtual rank that it carried out.
        size: number of ranks, or of virtual ranks.
        generation: of the commit that it came after.
        commit: the commit that it came after.
        epoch: the epoch.
        indices: the samples.
    """

    time: float
    pid: int
    rank: int
    size: int
    generation: int
    commit: int
    epoch: int
    indices: tuple[int, ...]


class Ledger:
    """Writes the batches of this process.

    Args:
        folder: where to; None writes nothing.
        state: whose commits to refer to.
    """

    def __init__(self, folder: Path | None, state: State) -> None:
        self._folder = folder
        self._state = state
        self._file: TextIO | None = None

    def batch(self, rank: int, size: int, indices: Sequence[int]) -> None:
        """Write down one batch of the state's epoch, before the commit that makes it count."""
        if self._folder is None:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"{socket.gethostname()}-{os.getpid()}.jsonl").open("a", buffering=1)
        last = self._state.last_commit
        when = [time.time(), os.getpid(), rank, size, last.generation, last.commit, self._state.epoch]
        self._file.write(json.dumps([*when, list(indices)]) + "\n")


def read(folder: Path) -> list[Batch]:
    """All batches, in order of time; a line that a killed process left half-written is passed over."""
    batches: list[Batch] = []
    for path in folder.glob("*.jsonl"):
        batches += [batch for line in path.read_text().splitlines() if (batch := _batch(line))]
    return sorted(batches, key=lambda batch: batch.time)


@functools.lru_cache(1 << 16)  # whoever follows a run reads the same lines again and again
def _batch(line: str) -> Batch | None:
    try:
        *fields, indices = json.loads(line)
    except ValueError:
        return None
    return Batch(*[*fields, tuple(indices)])


def committed(batches: Sequence[Batch], starts: dict[int, int]) -> list[Batch]:
    """The batches that are part of the final state.

    Args:
        batches: all batches.
        starts: generation to the commit that it resumed from, for all generations.
    """
    return [
        batch
        for batch in batches
        if all(start > batch.commit for generation, start in starts.items() if generation > batch.generation)
    ]
