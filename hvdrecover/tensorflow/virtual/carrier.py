"""Carrying out virtual ranks in TensorFlow: their buffers swapped in, their gradients summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdrecover.elastic.commits.own import Value
from hvdrecover.elastic.virtual import collectives, steps
from hvdrecover.elastic.virtual.shares import Counts
from hvdrecover.errors import ConfigError, StepError
from hvdrecover.tensorflow import faults
from hvdrecover.tensorflow.optimizer import Distributed
from hvdrecover.tensorflow.own_gradients import Gradient
from hvdrecover.tensorflow.sync_batch_norm import SyncBatchNormalization
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
        ConfigError: an optimizer averages gradients by itself, or a layer statistics.
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
        _refuse_averages(layers)
        collectives.watch(hvd.mpi_ops, "MPI_LIB", _look)  # for functions that are traced from now on, too
        self._buffers = Buffers(layers)
        self.values: Mapping[str, Value] = {"_buffers": self._buffers} if self._buffers.exist else {}
        self.gradients = Gradients(size)

    @property
    def absorbed(self) -> int:
        """See `hvdrecover.elastic.virtual.ranks.Carrier`."""
        return self._buffers.absorbed

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


def _refuse_averages(layers: Mapping[str, keras.layers.Layer]) -> None:
    """Refuse batch norm over processes."""
    for name, layer in layers.items():
        for each in layer._flatten_layers():
            if isinstance(each, SyncBatchNormalization):
                place, kind = f"state.{name}.{each.name}", "SyncBatchNormalization"
                instead = "keras.layers.BatchNormalization"
                raise collectives.averages(place, kind, instead, "GroupNormalization")


def _look(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse() -> None:
        try:
            collectives.refuse(call)
        except StepError as error:
            faults.raised(error)  # TensorFlow makes another one of it in a graph
            raise

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin(*arguments: Any, **options: Any) -> Any:
        if str(options.get("name")).startswith(collectives.OURS):
            return function(*arguments, **options)
        if tf.executing_eagerly():
            refuse()
            return function(*arguments, **options)
        with tf.device("CPU:0"):
            refused = tf.py_function(refuse, [], [])
        with tf.control_dependencies([refused]):
            return function(*arguments, **options)

    unconverted: Callable[..., Any] = begin
    return unconverted
