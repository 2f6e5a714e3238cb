"""The guard in TensorFlow: structure, numbers that are not finite, shares of the data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdrecover.errors import ConfigError, NumericsError
from hvdrecover.guard import structure
from hvdrecover.guard.numbers import Judge, RolledBack
from hvdrecover.state.adapter import Entry
from hvdrecover.tensorflow.averaging import own, sums
from hvdrecover.tensorflow.optimizer import Distributed, watch
from hvdrecover.tensorflow.variables import Variable, named, raw, without_numbers
from hvdrecover.tensorflow.world import TensorFlowWorld, raised


def describe(component: Any) -> list[Entry]:
    """Return names, shapes and dtypes of a component's variables, and an optimizer's configuration.

    Names go without the numbers that Keras gives: these depend on earlier layers of the process.
    """
    entries = [
        Entry(
            f".{number}.{without_numbers(name)}",
            f"{variable.dtype.name}{list(variable.shape)}{', trained' if variable.trainable else ''}",
        )
        for number, (name, variable) in enumerate(named(component).items())
    ]
    if isinstance(component, keras.optimizers.Optimizer):
        entries.insert(0, Entry("", f"a {type(component).__name__}"))
        entries += [
            Entry(
                f".{name}",
                json.dumps(value, default=str, sort_keys=True),
                setting=True,
                # Other settings are attributes of the optimizer, which a commit does not hold.
                stored=name == "learning_rate" and isinstance(value, float),
            )
            for name, value in sorted(component.get_config().items())
            if name != "name"
        ]
    return entries


def not_finite(variables: Mapping[str, tf.Variable]) -> list[str]:
    """Return names of the variables that hold NaN or infinity."""
    floats = {name: each for name, each in variables.items() if each.dtype.is_floating}
    if not floats or np.isfinite(sums(list(floats.values())).numpy()).all():
        return []
    return [name for name, each in floats.items() if not _is_finite(each)]


def _is_finite(tensor: tf.Tensor | tf.Variable) -> bool:
    parts = [tf.math.real(tensor), tf.math.imag(tensor)] if tensor.dtype.is_complex else [tensor]
    return all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in parts)


def report_gradients(components: Mapping[str, Any], judge: Judge) -> None:
    """Look at averaged gradients before each step of the Keras optimizers.

    A ``LossScaleOptimizer`` is left alone: it has overflows as a matter of course, and skips them itself.

    Args:
        components: by attribute name.
        judge: is told of bad steps.

    Raises:
        ConfigError: batches are to be left out, and a step sums up several.
    """
    optimizers = [each for each in components.values() if isinstance(each, keras.optimizers.Optimizer)]
    names = {
        id(variable): f"{name}.{inner}"
        for name, component in components.items()
        if not isinstance(component, keras.optimizers.Optimizer)
        for inner, variable in named(component).items()
    }
    for optimizer in optimizers:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            continue
        passes = optimizer._hvdrecover.passes if isinstance(optimizer, Distributed) else 1
        if judge.policy == "rollback" and passes > 1:
            raise ConfigError(
                "numerics",
                f"'rollback' leaves out one bad batch, but with backward_passes_per_step={passes} a step "
                "sums up several batches. Pass Guard(numerics='skip')",
            )
        own.wanted = True
        judge.steps = lambda optimizer=optimizer: int(optimizer.iterations)  # type: ignore[misc]
        watch(optimizer, _Reporter(judge, names))


class _Reporter:
    """Reports bad steps to the judge; see `hvdrecover.tensorflow.optimizer.Reporter`."""

    def __init__(self, judge: Judge, names: Mapping[int, str]) -> None:
        self.skips = judge.policy == "skip"
        self._judge = judge
        self._names = names

    def of(self, variables: Sequence[Variable]) -> Callable[..., bool]:
        names = [self._names.get(id(raw(each)), str(each.name)) for each in variables]
        return functools.partial(self._report, names)

    def _report(self, names: Sequence[str], mine: tf.Tensor, *averages: tf.Tensor) -> bool:
        bad = [name for name, each in zip(names, averages, strict=True) if not _is_finite(each)]
        if not bad:
            return True
        sent = dict(zip(names, np.isfinite(mine.numpy()).tolist(), strict=True))
        try:
            self._judge.gradients(bad, [name for name in bad if not sent[name]])
        except (NumericsError, RolledBack) as error:
            raised(error)
            raise
        return False


def check_shards(dataset: tf.data.Dataset, samples: Sequence[int] | None = None, length: int = -1) -> None:
    """Have all ranks compare their data sets before an epoch: how many batches, and which samples.

    A rank with fewer batches than the others would leave them waiting in the last allreduce.

    Args:
        dataset: this rank's batches; all ranks must call this.
        samples: the numbers of its samples in the whole data set, if known.
        length: samples of the whole data set, if known.

    Raises:
        ConfigError: it has no known number of batches.
        ShardsError: samples are missing or come more than once, or the number of batches or the length of the
            data set differ; on all ranks.

    Examples:
        >>> mine = list(range(hvd.rank(), 8, hvd.size()))
        >>> recover.check_shards(tf.data.Dataset.from_tensor_slices(mine).batch(2), mine, length=8)
    """
    batches = int(dataset.cardinality())
    if batches < 0:
        raise ConfigError(
            "dataset",
            "its number of batches is unknown or infinite; say it by "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))",
        )
    numbers = None if samples is None else np.asarray(samples, dtype=np.int64)
    structure.check_shards(TensorFlowWorld(), batches, numbers, length)
