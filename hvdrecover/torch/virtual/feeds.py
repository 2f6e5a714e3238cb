"""Batches for virtual ranks: of a loader over an elastic sampler, or of a loader for each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from hvdrecover.data.order import SampleOrder, is_sampler
from hvdrecover.elastic.commits.per_rank import PerRank
from hvdrecover.elastic.interfaces import Framework
from hvdrecover.elastic.virtual.feeds import Part, Streams, aside, deal
from hvdrecover.elastic.virtual.ranks import VirtualRanks
from hvdrecover.elastic.virtual.steps import Batches, Feed
from hvdrecover.errors import ConfigError


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
    if not any(sampler is each for each in tracked.values()) or not is_sampler(sampler):
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
        loader = self._loader
        size: int = loader.batch_size  # type: ignore[assignment]

        def read(parts: Iterable[Part]) -> Iterator[Any]:
            seeded = (
                _Part(part.samples.tolist(), ranks.sample_seeds(part.step, part.rank)) for part in parts
            )
            with aside(self._framework):  # a loader draws, too
                return iter(self._reading(seeded))

        return deal(self._order, size, ranks, read, drop_last=loader.drop_last)

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
        self._framework = framework
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker_init_fn may open a file, and leave it here.
        setattr(self._dataset, name, value) if "_dataset" in vars(self) else super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return _Seeded, (self._dataset, self._framework)  # workers may be sent it

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
