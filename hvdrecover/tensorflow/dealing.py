"""The batches that an elastic data set deals: to whom, in which order, and with which random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover.data.order import Indices, SampleOrder

Seed = npt.NDArray[np.int32]
"""Of shape ``[2]``."""

# Operations that draw from a stream of their own, or change a generator's state, as Keras's do.
_DRAWING = (
    "Random",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "Rng",
    "NonDeterministic",
    "SampleDistorted",
    "Assign",
)


class Dealing:
    """The order for an iteration over a data set.

    Args:
        order: the sample order.
        batch_size: samples in one rank's batch.

    Attributes:
        ranks: the virtual ranks whose batches come in turn; None if it is this rank's alone.
    """

    def __init__(self, order: SampleOrder, batch_size: int) -> None:
        self.order = order
        self.batch_size = batch_size
        self.ranks: Sequence[int] | None = None

    @property
    def of(self) -> Sequence[int]:
        """The ranks whose batches come in turn."""
        return (self.order.rank,) if self.ranks is None else self.ranks

    def batches(self) -> Iterator[tuple[Indices, Seed]]:
        """Begin an iteration: yield the samples of each batch, and its seed."""
        self.order.begin()
        shares = {rank: self.order.share_of(rank) for rank in self.of}
        for start, rank, seed in self._parts():
            yield shares[rank][start : start + self.batch_size], seed

    def seeds(self) -> Iterator[Seed]:
        """Yield the seed of each batch of the iteration that was begun."""
        for _, _, seed in self._parts():
            yield seed

    def _parts(self) -> Iterator[tuple[int, int, Seed]]:
        order, first, ranks = self.order, self.order.done, self.of
        for start in range(0, order.rounds, self.batch_size):
            position = order.position(first, start)
            for rank in ranks:
                yield start, rank, _seed(order, position, rank)


def _seed(order: SampleOrder, position: int, rank: int) -> Seed:
    """The seed of a batch, by where it is in the order."""
    facts = [order.seed % 2**64, order.epoch, position, rank]
    return np.random.SeedSequence(facts).generate_state(2).view(np.int32)


def takes_seed(transform: Callable[..., Any]) -> bool:
    """Return whether a function has a keyword-only parameter ``seed``."""
    try:
        parameter = inspect.signature(transform).parameters.get("seed")
    except (TypeError, ValueError):  # of built-in functions, Python may not know
        return False
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def draws(pipeline: tf.data.Dataset) -> str | None:
    """Return an operation of a data set's own functions that draws random numbers in the order of batches."""
    for wrapped in pipeline._functions():
        graph = wrapped.function.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        for node in nodes:
            if node.op.startswith(_DRAWING):
                return str(node.op)
    return None
