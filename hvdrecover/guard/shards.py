"""A check that the ranks' shares of a data set fit together, before an epoch is begun with them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvdrecover.errors import ShardsError
from hvdrecover.guard.votes import by_value, named
from hvdrecover.state.adapter import World

_LISTED = 5  # samples in a line
Samples = npt.NDArray[np.int64]


def check(world: World, batches: int, samples: Samples | None, length: int = -1) -> None:
    """Have all ranks compare their shares.

    Args:
        world: the ranks, all of which must call this.
        batches: how many batches this rank will have.
        samples: the numbers of its samples, int64 of shape ``[n]``; None if unknown, on all ranks.
        length: samples of the whole data set; -1 if unknown.

    Raises:
        ShardsError: they do not fit together; on all ranks.
    """
    row = [batches, -1 if samples is None else len(samples), length]
    table = world.allgather(row, "hvdrecover.shards")
    lines = _unequal(*table.T.tolist())
    if not lines and samples is not None and length >= 0:
        dealt = [
            np.frombuffer(each, np.int64) for each in world.gather(samples.tobytes(), "hvdrecover.shards.all")
        ]
        lines = _uncovered(dealt, length)
    if lines:
        raise ShardsError(
            "the ranks' shares of the training data don't fit together",
            lines,
            "Deal the samples out by rank and number of ranks, in one order for all, as ElasticSampler and "
            "elastic_dataset do.",
        )


def _unequal(batches: list[int], samples: list[int], lengths: list[int]) -> list[str]:
    """The counts that differ between the ranks: a line each."""
    lines = []
    if len(set(batches)) > 1:
        fewest = min(batches)
        done = [rank for rank, count in enumerate(batches) if count == fewest]
        waiting = [rank for rank, count in enumerate(batches) if count > fewest]
        follows = f"after batch {fewest}, {named(waiting)} would wait for {named(done)}"
        lines.append(f"batches: {by_value(batches)}; {follows}")
    if len(set(lengths)) > 1:
        lines.append(f"length of the data set: {by_value(lengths)}")
    if len(set(batches)) == 1 and len(set(samples)) > 1:
        lines.append(f"samples: {by_value(samples)}")
    return lines


def _uncovered(dealt: list[Samples], length: int) -> list[str]:
    """The faults in the samples that are dealt out to each rank: a line each.

    A last round that is not full is filled up or left out, so fewer samples than there are ranks may be dealt
    out twice, or not at all.
    """
    outside = [int(((each < 0) | (each >= length)).sum()) for each in dealt]
    if any(outside):
        return [f"numbers that are not a sample's, of {length}: {by_value(outside)}"]
    counts = np.bincount(np.concatenate(dealt), minlength=length)
    repeated, missing = np.flatnonzero(counts > 1), np.flatnonzero(counts == 0)
    lines = []
    if int((counts[repeated] - 1).sum()) >= len(dealt):
        lines.append(f"overlap: {len(repeated)} of {length} samples come more than once: {_some(repeated)}")
    if len(missing) >= len(dealt):
        lines.append(f"missing: {len(missing)} of {length} samples don't come at all: {_some(missing)}")
    return lines


def _some(samples: Samples) -> str:
    listed = ", ".join(map(str, samples[:_LISTED].tolist()))
    return f"{listed}, …" if len(samples) > _LISTED else listed
