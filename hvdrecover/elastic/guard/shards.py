"""A check that the ranks' shares of a data set fit together, before an epoch is begun with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdrecover.elastic.guard.votes import by_value, named
from hvdrecover.elastic.interfaces import World
from hvdrecover.errors import ShardsError

_PIECE = 1 << 20  # samples of each rank in one collective
_LISTED = 5  # samples in a line


@dataclass(frozen=True)
class Share:
    """The share of an epoch that one rank is about to go through.

    Attributes:
        batches: how many batches.
        samples: how many samples; -1 if unknown.
        length: of the whole data set; -1 if unknown.
    """

    batches: int
    samples: int = -1
    length: int = -1


def check(world: World, batches: int, samples: npt.NDArray[np.int64] | None, length: int = -1) -> None:
    """Have all ranks compare what they are about to go through.

    Args:
        world: the ranks, all of whom must call this.
        batches: how many batches this rank will have; -1 if unknown.
        samples: the numbers of its samples, int64 of shape ``[n]``; None if unknown, on all ranks.
        length: samples of the whole data set; -1 if unknown.

    Raises:
        ShardsError: they don't fit together; on all ranks.
    """
    row = [batches, -1 if samples is None else len(samples), length]
    shares = [Share(*each) for each in world.allgather(row, "hvdrecover.shards").tolist()]
    lines = faults(shares)
    if not lines and samples is not None and length >= 0:
        lines = _outside(world, samples, length) or coverage(_counts(world, samples, length), world.size())
    if lines:
        raise ShardsError(
            "the ranks' shares of the training data don't fit together",
            lines,
            "Deal the samples out by rank and number of ranks, in one order for all, as ElasticSampler and "
            "elastic_dataset do.",
        )


def _outside(world: World, samples: npt.NDArray[np.int64], length: int) -> list[str]:
    outside = int(((samples < 0) | (samples >= length)).sum())
    found = world.allgather([outside], "hvdrecover.shards.outside")[:, 0].tolist()
    return [f"numbers that are not a sample's, of {length}: {by_value(found)}"] if any(found) else []


def _counts(world: World, samples: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Return how often each sample is dealt out; all ranks have equally many."""
    counts = np.zeros(length, dtype=np.int64)
    for start in range(0, len(samples), _PIECE):
        piece = world.allgather(samples[start : start + _PIECE].tolist(), f"hvdrecover.shards.{start}")
        counts += np.bincount(piece.reshape(-1), minlength=length)
    return counts


def faults(shares: Sequence[Share]) -> list[str]:
    """Return what is wrong with the ranks' counts: a line each.

    Args:
        shares: by rank.
    """
    lines = []
    batches = [share.batches for share in shares]
    if len(set(batches)) > 1:
        fewest = min(batches)
        done = [rank for rank, count in enumerate(batches) if count == fewest]
        waiting = [rank for rank, count in enumerate(batches) if count > fewest]
        follows = f"after batch {fewest}, {named(waiting)} would wait for {named(done)}"
        lines.append(f"batches: {by_value(batches)}; {follows}")
    lengths = [share.length for share in shares]
    if len(set(lengths)) > 1:
        lines.append(f"length of the data set: {by_value(lengths)}")
    samples = [share.samples for share in shares]
    if len(set(batches)) == 1 and len(set(samples)) > 1:
        lines.append(f"samples: {by_value(samples)}")
    return lines


def coverage(counts: npt.NDArray[np.int64], size: int) -> list[str]:
    """Return what is wrong with how often each sample is dealt out: a line each.

    A last round that is not full is filled up or left out, so fewer samples than there are ranks may be dealt
    out twice, or not at all.

    Args:
        counts: how often; int64 of shape ``[length]``.
        size: number of ranks.
    """
    repeated = np.flatnonzero(counts > 1)
    missing = np.flatnonzero(counts == 0)
    extra = int((counts[repeated] - 1).sum())
    lines = []
    if extra >= size:
        lines.append(
            f"overlap: {len(repeated)} of {len(counts)} samples come more than once: {_some(repeated)}"
        )
    if len(missing) >= size:
        found = f"{len(missing)} of {len(counts)} samples don't come at all"
        lines.append(f"missing: {found}: {_some(missing)}")
    return lines


def _some(samples: npt.NDArray[np.int64]) -> str:
    listed = ", ".join(map(str, samples[:_LISTED].tolist()))
    return f"{listed}, …" if len(samples) > _LISTED else listed
