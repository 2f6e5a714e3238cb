"""Reads the ledgers of the digits examples: which samples were trained on after which commit.

`committed` says which batches are part of the final state. A batch that was trained on after commit ``k`` of
generation ``g`` is lost if a later generation resumed from commit ``k`` or an earlier one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Batch:
    """One rank's part of one training step: a line of `hvdrecover.examples.digits.Ledger`.

    Attributes:
        time: when it was done, in seconds since the Unix epoch.
        pid: the process that did it.
        rank: its rank, or the virtual rank that it carried out.
        size: number of ranks, or of virtual ranks.
        generation: generation of the last commit before it.
        commit: number of the last commit before it.
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


def read(folder: Path) -> list[Batch]:
    """Return all batches in order of time. Incomplete lines of killed processes are skipped."""
    batches: list[Batch] = []
    for path in folder.glob("*.jsonl"):
        batches += [batch for line in path.read_text().splitlines() if (batch := _batch(line))]
    return sorted(batches, key=lambda batch: batch.time)


@functools.lru_cache(1 << 16)  # tests that follow a run read the same lines again and again
def _batch(line: str) -> Batch | None:
    try:
        *fields, indices = json.loads(line)
    except ValueError:
        return None
    return Batch(*[*fields, tuple(indices)])


def committed(batches: Sequence[Batch], starts: dict[int, int]) -> list[Batch]:
    """Return the batches that are part of the final state.

    Args:
        batches: all batches.
        starts: generation to the commit that it resumed from, for all generations.
    """
    return [
        batch
        for batch in batches
        if all(start > batch.commit for generation, start in starts.items() if generation > batch.generation)
    ]
