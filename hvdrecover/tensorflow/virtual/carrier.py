"""Carrying out virtual ranks in TensorFlow: their buffers swapped in, their gradients summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdrecover.elastic.commits.own import Value
from hvdrecover.elastic.virtual import steps
from hvdrecover.elastic.virtual.shares import Counts
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.optimizer import Distributed
from hvdrecover.tensorflow.own_gradients import Gradient
from hvdrecover.tensorflow.virtual.buffers import Buffers
from hvdrecover.tensorflow.virtual.gradients import Gradients


class TensorFlowCarrier:
    """The TensorFlow side of virtual ranks; see `hvdrecover.elastic.virtual.ranks.Carrier`.

    Args:
        components: the state's attributes by name, models and optimizers among them.
        size: number of virtual ranks.

    Attributes:
        values: what models hold besides what is trained, if that is anything.
        gradients: of the virtual ranks.

    Raises:
        ConfigError: an optimizer averages gradients by itself.
    """

    def __init__(self, components: Mapping[str, Any], size: int) -> None:
        for name, each in components.items():
            if isinstance(each, Distributed):
                raise ConfigError(
                    f"state.{name}",
                    "it averages gradients over processes, and state.steps() does over virtual ranks; leave "
                    "out DistributedOptimizer",
                )
        layers = {name: each for name, each in components.items() if isinstance(each, keras.layers.Layer)}
        self._buffers = Buffers(layers)
        self.values: Mapping[str, Value] = {"_buffers": self._buffers} if self._buffers.exist else {}
        self.gradients = Gradients(size)

    def begin(self, counts: Counts, process: int) -> None:
        """A step begins."""
        self._buffers.absorb()
        self.gradients.begin(counts, process)

    def part_begins(self, rank: int) -> None:
        """Swap the buffers of a virtual rank in."""
        self._buffers.swap_in(rank)
        self.gradients.part_begins(rank)

    def part_ends(self, rank: int) -> None:
        """Take the gradients of a virtual rank, and keep its buffers."""
        self.gradients.part_ends()
        self._buffers.swap_out(rank)

    def finish(self) -> None:
        """Sum the gradients of all virtual ranks."""
        self.gradients.finish()

    def abandon(self) -> None:
        """Forget what is under way."""
        self.gradients.abandon()


class Step(steps.Step):
    """One step of all virtual ranks. Iterate over it, once: over the batches of those of this process."""

    def add(self, gradients: Sequence[Gradient]) -> None:
        """Hand over the gradients of the virtual rank that is being carried out; several calls add up.

        Args:
            gradients: one for each variable, as ``tape.gradient(loss, model.trainable_variables)`` gives
                them; sparse ones are made dense, None adds nothing.

        Raises:
            StepError: none is being carried out, or there are more or fewer gradients than variables.
        """
        self._carrier.gradients.add(gradients)

    def gradients(self) -> list[Gradient]:
        """Return the gradients of the whole job, one for each variable, when the inner loop has ended.

        Raises:
            StepError: it has not.
        """
        return self._carrier.gradients.result()

    @property
    def _carrier(self) -> TensorFlowCarrier:
        carrier = self._ranks.carrier
        assert isinstance(carrier, TensorFlowCarrier)
        return carrier
