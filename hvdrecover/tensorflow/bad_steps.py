"""A look at the gradients of each step: this rank's own, and what all ranks have made of them.

Gradients that are not finite on one rank are not finite on any after the allreduce, so all ranks see a bad
step without a word. An optimizer that is watched then leaves its variables alone, and only then is Python
called, in a graph as well.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdrecover.elastic.guard.judge import Judge
from hvdrecover.tensorflow.blank_gradients import sent
from hvdrecover.tensorflow.finite import Gate, each_finite
from hvdrecover.tensorflow.optimizer import Distributed
from hvdrecover.tensorflow.own_gradients import Gradient, own, values
from hvdrecover.tensorflow.variables import Variable, named, raw


def watch(components: Mapping[str, Any], judge: Judge) -> None:
    """Have optimizers leave out bad steps.

    Args:
        components: by attribute name; Keras optimizers are watched, but for ``LossScaleOptimizer``, which
            has overflows as a matter of course, and leaves them out itself.
        judge: gets reports of bad steps.
    """
    sent.begin()
    names = {
        id(variable): f"{name}.{inner}"
        for name, component in components.items()
        if not isinstance(component, keras.optimizers.Optimizer)
        for inner, variable in named(component).items()
    }
    for optimizer in components.values():
        if isinstance(optimizer, keras.optimizers.Optimizer) and not isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ):
            if isinstance(optimizer, Distributed):
                judge.refuse_sums(optimizer._hvdrecover.passes)
            own.wanted = True
            judge.steps = lambda optimizer=optimizer: int(optimizer.iterations)  # type: ignore[misc]
            _watch(optimizer, _Reporter(judge, names))


def _watch(optimizer: keras.optimizers.Optimizer, reporter: _Reporter) -> None:
    if not isinstance(optimizer, Watched):
        averages = isinstance(optimizer, Distributed)
        kind = type(optimizer).__bases__[-1] if averages else type(optimizer)
        # Behind what averages; and of the same name and module, so that Keras saves it as what it was.
        kinds = (Distributed, Watched, kind) if averages else (Watched, kind)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        optimizer.__class__ = type(kind.__name__, kinds, names)
    optimizer._hvdrecover_reporter = reporter


class _Reporter:
    """Reports a bad step to the judge, from wherever it is found."""

    def __init__(self, judge: Judge, names: Mapping[int, str]) -> None:
        self._judge = judge
        self._names = names
        self._gates: dict[tuple[str, ...], Gate] = {}

    @property
    def skips(self) -> bool:
        """Return whether training may continue without a bad step; otherwise a shut gate raises an error."""
        return self._judge.skips

    def gate(self, variables: Sequence[Variable]) -> Gate:
        """Return the gate of the gradients of some variables."""
        names = tuple(self._names.get(id(raw(each)), str(each.name)) for each in variables)
        if (
            names not in self._gates
        ):  # not one for each step: TensorFlow keeps something for each gate it has seen
            self._gates[names] = Gate(functools.partial(self._report, names))
        return self._gates[names]

    def _report(self, names: Sequence[str], finite: Sequence[bool], mine: Sequence[bool]) -> None:
        bad = [name for name, good in zip(names, finite, strict=True) if not good]
        here = [name for name, good in zip(names, mine, strict=True) if not good]
        sent.settle()
        self._judge.gradients(bad, [name for name in here if name in bad])


class Watched(keras.optimizers.Optimizer):  # type: ignore[misc]
    """The methods that are added to an optimizer's class."""

    _hvdrecover_reporter: _Reporter

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Apply gradients as the optimizer does, unless they are not finite."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        given = [gradient for gradient in grads if gradient is not None]
        theirs = [each for each, gradient in zip(variables, grads, strict=True) if gradient is not None]
        mine = own.of(theirs) if given and self.built else None
        if mine is None:  # not averaged by us, so other ranks may see other gradients
            super().apply(grads, trainable_variables)
            return
        good = self._hvdrecover_reporter.gate(theirs)(each_finite([values(each) for each in given]), mine)
        if not self._hvdrecover_reporter.skips:
            # A bad step ends in an error, so nothing has to be left out, and a branch would cost two percent.
            with tf.control_dependencies([good]):
                super().apply(grads, trainable_variables)
            return

        def step() -> tf.Tensor:
            super(Watched, self).apply(grads, trainable_variables)
            return tf.constant(True)

        tf.cond(good, step, lambda: tf.constant(False))
