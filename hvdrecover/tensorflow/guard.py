"""The guard in TensorFlow: structure, gradients that are not finite, shares of the data."""

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
from hvdrecover.tensorflow import faults, xla
from hvdrecover.tensorflow.optimizer import Distributed
from hvdrecover.tensorflow.own_gradients import Gradient, own, sums, values
from hvdrecover.tensorflow.variables import Variable, named, raw, without_numbers
from hvdrecover.tensorflow.world import TensorFlowWorld


def describe(component: Any) -> list[Entry]:
    """Names, shapes and dtypes of a component's variables, and an optimizer's configuration.

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
                # Other settings are read from the optimizer's attributes, which a commit leaves alone.
                stored=name == "learning_rate" and isinstance(value, float),
            )
            for name, value in sorted(component.get_config().items())
            if name != "name"
        ]
    return entries


def not_finite(variables: Mapping[str, tf.Variable]) -> list[str]:
    """Names of the variables that hold NaN or infinity."""
    floats = {name: each for name, each in variables.items() if each.dtype.is_floating}
    if not floats or np.isfinite(sums(list(floats.values())).numpy()).all():
        return []
    return [name for name, each in floats.items() if not _is_finite(each)]


def _is_finite(tensor: tf.Tensor | tf.Variable) -> bool:
    parts = [tf.math.real(tensor), tf.math.imag(tensor)] if tensor.dtype.is_complex else [tensor]
    return all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in parts)


# -- gradients ---------------------------------------------------------------------------------------------


def report_gradients(components: Mapping[str, Any], judge: Judge) -> None:
    """Look at averaged gradients before each step of the Keras optimizers.

    A ``LossScaleOptimizer`` is left alone: it has overflows as a matter of course, and skips them itself.

    Args:
        components: by attribute name.
        judge: is told of bad steps.

    Raises:
        ConfigError: batches are to be left out, and a step sums up several.
    """
    names = {
        id(variable): f"{name}.{inner}"
        for name, component in components.items()
        if not isinstance(component, keras.optimizers.Optimizer)
        for inner, variable in named(component).items()
    }
    for optimizer in components.values():
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            continue
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            continue
        if isinstance(optimizer, Distributed):
            _refuse_sums(optimizer._hvdrecover.passes, judge)
        own.wanted = True
        judge.steps = lambda optimizer=optimizer: int(optimizer.iterations)  # type: ignore[misc]
        _watch(optimizer, _Reporter(judge, names))


def _refuse_sums(passes: int, judge: Judge) -> None:
    if judge.policy == "rollback" and passes > 1:
        raise ConfigError(
            "numerics",
            f"'rollback' leaves out one bad batch, but with backward_passes_per_step={passes} a step "
            "sums up several batches. Pass Guard(numerics='skip')",
        )


def _watch(optimizer: keras.optimizers.Optimizer, reporter: _Reporter) -> None:
    if not isinstance(optimizer, Watched):
        averages = isinstance(optimizer, Distributed)
        kind = type(optimizer).__bases__[-1] if averages else type(optimizer)
        # Behind the averaging; and of the same name and module, so that Keras saves it as the same class.
        kinds = (Distributed, Watched, kind) if averages else (Watched, kind)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        optimizer.__class__ = type(kind.__name__, kinds, names)
    optimizer._hvdrecover_reporter = reporter


class _Reporter:
    """Reports bad steps to the judge."""

    def __init__(self, judge: Judge, names: Mapping[int, str]) -> None:
        self.judge = judge
        self._names = names

    def of(self, variables: Sequence[Variable]) -> Callable[..., bool]:
        """Return `_report` for the gradients of some variables."""
        names = [self._names.get(id(raw(each)), str(each.name)) for each in variables]
        return functools.partial(self._report, names)

    def _report(self, names: Sequence[str], mine: tf.Tensor, *averages: tf.Tensor) -> bool:
        """Report averages whose sum is not finite.

        Args:
            names: of the variables.
            mine: sums of this rank's own gradients; float32 of shape ``[len(averages)]``.
            averages: the averaged gradients.

        Returns:
            Whether to apply the step: all are finite, and only their sum was too large.
        """
        bad = [name for name, each in zip(names, averages, strict=True) if not _is_finite(each)]
        if not bad:
            return True
        sent = dict(zip(names, np.isfinite(mine.numpy()).tolist(), strict=True))
        try:
            self.judge.gradients(bad, [name for name in bad if not sent[name]])
        except (NumericsError, RolledBack) as error:
            faults.raised(error)
            raise
        return False


class Watched(keras.optimizers.Optimizer):  # type: ignore[misc]
    """The methods that are added to an optimizer's class."""

    _hvdrecover_reporter: _Reporter

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Apply gradients as the optimizer does, unless they are not finite.

        Only a bad step calls Python, in a graph as well. The sums cost a small model about 20 µs in a step.
        """
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        given = [values(gradient) for gradient in grads if gradient is not None]
        theirs = [each for each, gradient in zip(variables, grads, strict=True) if gradient is not None]
        mine = own.of(theirs) if given and self.built else None
        if mine is None:  # not averaged by us, so other ranks may see other gradients
            super().apply(grads, trainable_variables)
            return
        report = self._hvdrecover_reporter.of(theirs)
        fine = tf.math.is_finite(tf.reduce_sum(sums(given)))
        if tf.executing_eagerly():
            if bool(fine) or report(mine, *given):
                super().apply(grads, trainable_variables)
            return
        xla.refuse("what a guard does about gradients that are not finite")

        def ask() -> tf.Tensor:
            with tf.device("CPU:0"):
                return tf.py_function(report, [mine, *given], tf.bool)

        good = tf.cond(fine, lambda: tf.constant(True), ask)
        if self._hvdrecover_reporter.judge.policy != "skip":
            # A bad step ends in an error, so nothing has to be left out, and a branch costs two percent.
            with tf.control_dependencies([good]):
                super().apply(grads, trainable_variables)
            return

        def step() -> tf.Tensor:
            super(Watched, self).apply(grads, trainable_variables)
            return tf.constant(True)

        tf.cond(good, step, lambda: tf.constant(False))


# -- shares of the data ------------------------------------------------------------------------------------


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
