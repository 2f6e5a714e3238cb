"""Batches for virtual ranks: of a loader over an elastic sampler, or of a loader for each of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from hvdrecover.data.order import SampleOrder
from hvdrecover.elastic.commits.per_rank import PerRank
from hvdrecover.elastic.interfaces import Framework
from hvdrecover.elastic.virtual.ranks import VirtualRanks
from hvdrecover.elastic.virtual.steps import Batches, Feed
from hvdrecover.errors import ConfigError, StepError

_END = object()


def feed(loader: Any, tracked: Mapping[str, Any], framework: Framework) -> Feed:
    """Return where the batches of a loop come from.

    Args:
        loader: a data loader whose sampler is one of the state's, or a `PerRank` of the state's.
        tracked: the state's attributes.
        framework: seeds generators.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(loader, PerRank) and any(loader is each for each in tracked.values()):
        return Streams(loader, framework)
    sampler = getattr(loader, "sampler", None)
    if not any(sampler is each for each in tracked.values()) or not isinstance(
        getattr(sampler, "order", None), SampleOrder
    ):
        raise ConfigError(
            "state.steps()",
            f"a {type(loader).__name__} can't be dealt out to virtual ranks; pass a DataLoader whose "
            "sampler, an ElasticSampler, is in the state, or a PerRank of the state",
        )
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "state.steps()", "make the DataLoader with batch_size=, and without a batch_sampler"
        )
    return Dealt(loader, framework)


class Dealt:
    """Batches of a data loader, dealt out to virtual ranks one sample each in turn.

    Samples are fetched, and augmented, under random streams of the virtual rank's own, whichever process of
    the loader's does it.

    Args:
        loader: with an elastic sampler.
        framework: seeds generators.
    """

    def __init__(self, loader: DataLoader[Any], framework: Framework) -> None:
        self._loader = loader
        self._framework = framework
        self._order: SampleOrder = loader.sampler.order  # type: ignore[attr-defined]

    def begin(self, ranks: VirtualRanks) -> Iterator[Batches]:
        """Yield the batches of each step from the cursor on."""
        order, loader = self._order, self._loader
        size: int = loader.batch_size  # type: ignore[assignment]
        order.begin()
        if order.on_iterate is not None:
            order.on_iterate()
        samples, first = order.rounds, ranks.steps
        starts = range(0, samples - (size - 1 if loader.drop_last else 0), size)
        mine = {rank: order.share_of(rank) for rank in ranks.carried.ranks}

        def parts() -> Iterator[_Part]:
            for step, start in enumerate(starts, first):
                for rank, share in mine.items():
                    yield _Part(share[start : start + size].tolist(), ranks.seeds(step, rank))

        batches = iter(self._reading(parts()) if mine else ())
        for start in starts:
            count = min(size, samples - start)
            yield Batches(lambda _: next(batches), functools.partial(order.record, count))

    def _reading(self, parts: Iterator[_Part]) -> DataLoader[Any]:
        """Return the loader, reading these parts."""
        # A copy, as the constructor of the script's own class may take other arguments.
        loader = copy.copy(self._loader)
        dataset = _Seeded(self._loader.dataset, self._framework)
        vars(loader).update(batch_sampler=parts, dataset=dataset, _iterator=None)
        return loader


class _Part(list[int]):
    """The samples of one virtual rank in one step.

    Args:
        samples: their numbers.
        seeds: of the generators while they are fetched.
    """

    def __init__(self, samples: list[int], seeds: Callable[[str], int]) -> None:
        super().__init__(samples)
        self.seeds = seeds


class _Seeded:
    """A data set whose samples are fetched part by part, each under its own seeds."""

    def __init__(self, dataset: Any, framework: Framework) -> None:
        self._dataset = dataset
        self._framework = framework

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, part: _Part) -> list[Any]:
        self._framework.seed(part.seeds)
        if callable(getattr(self._dataset, "__getitems__", None)):
            found: list[Any] = self._dataset.__getitems__(part)
            return found
        return [self._dataset[sample] for sample in part]


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
        for rank in ranks.carried.ranks:
            self._framework.seed(ranks.seeds(ranks.steps, rank))
            iterators[rank] = iter(loaders.of(rank))
        if loaders.on_iterate is not None:
            loaders.on_iterate()
        while True:
            found = {}
            for rank, iterator in iterators.items():
                self._framework.seed(ranks.seeds(ranks.steps, rank))
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
                return


def _nothing() -> None:
    """There is nothing to note: loaders know their place."""
