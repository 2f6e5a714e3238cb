"""Batches for virtual ranks: of an elastic data set, or of an iterator for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hvdrecover.elastic.commits.per_rank import PerRank
from hvdrecover.elastic.interfaces import Framework
from hvdrecover.elastic.virtual.feeds import Part, Streams, deal
from hvdrecover.elastic.virtual.ranks import VirtualRanks
from hvdrecover.elastic.virtual.steps import Batches, Feed
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.dataset import ElasticDataset


def feed(data: Any, tracked: Mapping[str, Any], framework: Framework) -> Feed:
    """Return where the batches of a loop come from.

    Args:
        data: an elastic data set, or a `PerRank`, of the state's.
        tracked: the state's attributes.
        framework: seeds generators.

    Raises:
        ConfigError: it is something else, or draws random numbers in the order in which batches are made.
    """
    if not any(data is each for each in tracked.values()) or not isinstance(data, PerRank | ElasticDataset):
        raise ConfigError(
            "state.steps()",
            f"a {type(data).__name__} can't be dealt out to virtual ranks; pass a data set made by "
            "elastic_dataset() that is in the state, or a PerRank of the state",
        )
    return Streams(data, framework) if isinstance(data, PerRank) else Dealt(data)


class Dealt:
    """Batches of an elastic data set, dealt out to virtual ranks one sample each in turn.

    Args:
        data: the data set.

    Raises:
        ConfigError: its transform draws random numbers that depend on what was drawn before.
    """

    def __init__(self, data: ElasticDataset) -> None:
        if (operation := data.draws()) is not None:
            raise ConfigError(
                "transform",
                f"it draws random numbers ({operation}) in the order in which a process makes batches, so "
                "they would depend on the number of processes; give it a keyword-only parameter seed, and "
                "draw by tf.random.stateless_*(..., seed=seed)",
            )
        self._data = data

    def begin(self, ranks: VirtualRanks) -> Iterator[Batches]:
        """Yield the batches of each step from the cursor on."""

        def read(parts: Iterable[Part]) -> Iterator[Any]:
            return self._data.batches(ranks.carried.ranks)  # which deals by itself, the same

        return deal(self._data.order, self._data.batch_size, ranks, read)
