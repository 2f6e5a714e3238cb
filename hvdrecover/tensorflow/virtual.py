"""Virtual ranks in loops of one's own in TensorFlow: their buffers, their batches and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdrecover.errors import ConfigError, StepError
from hvdrecover.state.adapter import Framework
from hvdrecover.state.rank_local import PerRank
from hvdrecover.tensorflow import faults
from hvdrecover.tensorflow.dataset import ElasticDataset
from hvdrecover.tensorflow.optimizer import Distributed
from hvdrecover.tensorflow.own_gradients import Gradient
from hvdrecover.tensorflow.sync_batch_norm import SyncBatchNormalization
from hvdrecover.tensorflow.variables import named
from hvdrecover.tensorflow.virtual_gradients import Gradients
from hvdrecover.virtual import buffers, ranks, steps
from hvdrecover.virtual.ranks import VirtualRanks
from hvdrecover.virtual.shares import Policy


def virtual_ranks(components: Mapping[str, Any], size: int, policy: Policy | None) -> VirtualRanks:
    """Make the virtual ranks of a state.

    Args:
        components: the state's attributes by name, models and optimizers among them.
        size: number of virtual ranks.
        policy: how they are assigned.

    Raises:
        ConfigError: an optimizer averages gradients by itself, or a layer averages statistics.
    """
    for name, each in components.items():
        if isinstance(each, Distributed):
            raise ConfigError(
                f"state.{name}",
                "it averages gradients over processes, and state.steps() does over virtual ranks; leave "
                "out DistributedOptimizer",
            )
    layers = {name: each for name, each in components.items() if isinstance(each, keras.layers.Layer)}
    _refuse_averages(layers)
    ranks.watch(hvd.mpi_ops, "MPI_LIB", _look)  # for functions that are traced from now on, too
    return VirtualRanks(size, policy, Buffers(layers), [Gradients(size)])


def gradients_of(virtual: VirtualRanks) -> Gradients:
    """Return the gradients of the virtual ranks."""
    (gradients,) = virtual.gradients
    assert isinstance(gradients, Gradients)
    return gradients


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
        gradients_of(self._ranks).add(gradients)

    def gradients(self) -> list[Gradient]:
        """Return the gradients of the whole job, one for each variable, when the inner loop has ended.

        Raises:
            StepError: it has not.
        """
        return gradients_of(self._ranks).result()


def _refuse_averages(layers: Mapping[str, keras.layers.Layer]) -> None:
    """Refuse batch norm over processes."""
    for name, layer in layers.items():
        for each in layer._flatten_layers():
            if isinstance(each, SyncBatchNormalization):
                place, instead = f"state.{name}.{each.name}", "keras.layers.BatchNormalization"
                raise ranks.averages(place, "SyncBatchNormalization", instead, "GroupNormalization")


def _look(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of Horovod's library that is refused in a part, unless it is ours."""

    def refuse() -> None:
        try:
            ranks.refuse(call)
        except StepError as error:
            faults.raised(error)  # TensorFlow makes another one of it in a graph
            raise

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin(*arguments: Any, **options: Any) -> Any:
        if str(options.get("name")).startswith(ranks.OURS):
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


class Buffers(buffers.Buffers):
    """See `hvdrecover.virtual.buffers.Buffers`: the variables that are not trained.

    Seeds are not among them: each part has its own. A variable shares memory with its copies until it is
    assigned.

    Args:
        layers: models and layers by attribute name.
    """

    def __init__(self, layers: Mapping[str, keras.layers.Layer]) -> None:
        self._variables = {
            f"{attribute}.{name}": variable
            for attribute, layer in layers.items()
            for name, variable in named(layer).items()
            if not variable.trainable
        }
        super().__init__()

    def names(self) -> Iterable[str]:
        """Return the names of the variables."""
        return self._variables.keys()

    def read(self, name: str) -> tf.Tensor:
        """Return a variable's content."""
        variable = self._variables[name]
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)

    def write(self, name: str, tensor: tf.Tensor) -> None:
        """Assign to a variable."""
        tf.raw_ops.AssignVariableOp(resource=self._variables[name].handle, value=tensor)

    def bits(self, tensor: tf.Tensor) -> bytes:
        """Return the bytes of a variable's content."""
        return bytes(np.ascontiguousarray(tensor._numpy()).tobytes())


def feed(data: Any, tracked: Mapping[str, Any], framework: Framework) -> steps.Feed:
    """Return the source of a loop's batches.

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
    if isinstance(data, PerRank):
        return lambda ranks: steps.streams(data, ranks, framework)
    if (operation := data.draws()) is not None:
        raise ConfigError(
            "transform",
            f"it draws random numbers ({operation}) in the order in which a process makes batches, so "
            "they would depend on the number of processes; give it a keyword-only parameter seed, and "
            "draw by tf.random.stateless_*(..., seed=seed)",
        )
    # The data set deals its samples out by itself, in the same way.
    return lambda ranks: steps.deal(
        data.order, data.batch_size, ranks, lambda parts: data.batches(ranks.carried.ranks)
    )
