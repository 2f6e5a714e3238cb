"""Batches for virtual ranks: of samples dealt out to them, or of a loader for each of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdrecover.data.order import Indices, SampleOrder
from hvdrecover.elastic.commits.per_rank import PerRank
from hvdrecover.elastic.interfaces import Framework
from hvdrecover.elastic.virtual.ranks import VirtualRanks
from hvdrecover.elastic.virtual.steps import Batches
from hvdrecover.errors import StepError

_END = object()


@dataclass(frozen=True)
class Part:
    """The samples of one virtual rank in one step.

    Attributes:
        step: the step.
        rank: the virtual rank.
        samples: their numbers; int64.
    """

    step: int
    rank: int
    samples: Indices


def deal(
    order: SampleOrder,
    size: int,
    ranks: VirtualRanks,
    read: Callable[[Iterable[Part]], Iterator[Any]],
    *,
    drop_last: bool = False,
) -> Iterator[Batches]:
    """Deal samples out to virtual ranks one each in turn; yield the batches of each step from the cursor on.

    Args:
        order: of the samples.
        size: samples in one virtual rank's batch.
        ranks: the virtual ranks.
        read: begins to read the parts of this process, in their order; returns their batches.
        drop_last: leave out batches that are not full.
    """
    order.begin()
    if order.on_iterate is not None:
        order.on_iterate()
    samples, first, epoch = order.rounds, ranks.steps, order.epoch
    starts = range(0, samples - (size - 1 if drop_last else 0), size)
    mine = {rank: order.share_of(rank) for rank in ranks.carried.ranks}
    parts = (
        Part(step, rank, share[start : start + size])
        for step, start in enumerate(starts, first)
        for rank, share in mine.items()
    )

    def done(count: int) -> None:
        if order.epoch == epoch:  # the script may have left the loop, and gone to the next one
            order.record(count)

    batches = read(parts) if mine and starts else iter(())
    for start in starts:
        count = min(size, samples - start)
        yield Batches(lambda _: next(batches), functools.partial(done, count))


@contextlib.contextmanager
def aside(framework: Framework) -> Iterator[None]:
    """Leave the random streams as they were; what is drawn from them depends on the process.

    Args:
        framework: knows the generators.
    """
    states = framework.generators()
    yield
    framework.set_generators(states)


class Streams:
    """Batches of loaders that know their place, one for each virtual rank; see `PerRank`.

    Args:
        loaders: the loaders.
        framework: seeds generators.
    """

    def __init__(self, loaders: PerRank, framework: Framework) -> None:
        self._loaders = loaders
        self._framework = framework

    def begin(self, ranks: VirtualRanks) -> Iterator[Batches]:
        """Yield the batches of each step, until the loaders end.

        Raises:
            StepError: the loader of one virtual rank ends before that of another.
        """
        loaders, iterators = self._loaders, {}
        with aside(self._framework):
            for rank in ranks.carried.ranks:
                self._framework.seed(ranks.sample_seeds(ranks.steps, rank))
                iterators[rank] = iter(loaders.of(rank))
        if loaders.on_iterate is not None:
            loaders.on_iterate()
        while True:
            found = {}
            with aside(self._framework):
                for rank, iterator in iterators.items():
                    self._framework.seed(ranks.sample_seeds(ranks.steps, rank))
                    found[rank] = next(iterator, _END)
            ended = [rank for rank, batch in found.items() if batch is _END]
            if ranks.any_has_more(len(ended) < len(found)) and not ended:
                loaders.taken += 1
                yield Batches(found.__getitem__, _nothing)
            elif 0 < len(ended) < len(found):
                raise StepError(
                    "state.steps()",
                    f"the loader of virtual rank {ended[0]} has ended, and others have not: they must have "
                    "the same number of batches",
                )
            else:
                for rank in ended:
                    loaders.ended(rank)
                return


def _nothing() -> None:
    """There is nothing to note: loaders know their place."""
