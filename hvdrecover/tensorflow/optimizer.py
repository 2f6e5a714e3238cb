"""Keras optimizers whose steps are hooked, in ``model.fit`` and in loops of the user's own.

An optimizer gets another class of the same name, whose `apply` does, in this order:

1. If the optimizer was made distributed: add up the gradients of several passes, and average them across the
   ranks (`Distributed`).
2. If the state has a guard: look at the averaged gradients before the optimizer applies them (`Watched`).
3. Apply them as the optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.averaging import Reduction, numbers_of, own, sums
from hvdrecover.tensorflow.collectives import outside_of_traces, refuse_xla, taking_what
from hvdrecover.tensorflow.variables import Gradient, Layers, Variable, raw, weights_of


def distribute(
    optimizer: keras.optimizers.Optimizer,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    local_layers: Layers = None,
    use_locking: bool = False,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Have an optimizer average gradients across the ranks, in ``model.fit`` and in loops of your own.

    The optimizer itself is changed and returned, with all that it holds. For mixed precision, wrap the
    ``LossScaleOptimizer``: then all ranks see the same gradients, and skip the same steps.

    Args:
        optimizer: a Keras optimizer.
        backward_passes_per_step: add up the gradients of so many calls on this rank first, and then apply
            them once. What has been added up is forgotten when a commit is loaded, so commit after whole
            steps only.
        average_aggregated_gradients: whether that is their mean, and not their sum.
        local_layers: layers whose gradients are left to each rank.
        use_locking: of optimizers of TensorFlow 1; Keras's have none.
        options: see `hvdrecover.tensorflow.averaging.Reduction`.

    Raises:
        ConfigError: not a Keras optimizer, one that has been through this, or an invalid value.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "optimizer",
            f"a {type(optimizer).__name__} is not an optimizer of keras.optimizers; those of "
            "TensorFlow 1 need its sessions, and can't recover",
        )
    if isinstance(optimizer, Distributed):
        raise ConfigError("optimizer", "it averages gradients already; make it distributed once")
    if backward_passes_per_step < 1:
        raise ConfigError(
            "backward_passes_per_step", f"{backward_passes_per_step!r} is not a number from 1 on"
        )
    if use_locking:
        raise ConfigError("use_locking", "Keras's optimizers have no locks; leave it out")
    reduction = Reduction(**options)
    reduction.keep_local(weights_of(local_layers))
    _mix_in(optimizer, Distributed)
    divisor = backward_passes_per_step if average_aggregated_gradients else 1
    optimizer._hvdrecover = _Settings(reduction, backward_passes_per_step, divisor)
    return optimizer


DistributedOptimizer = taking_what(hvd.DistributedOptimizer, distribute)
"""See `distribute`; it takes what Horovod's takes.

Examples:
    >>> optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1))
"""


class Reporter(Protocol):
    """A guard's part in a step."""

    skips: bool
    """Whether a bad step is left out. If not, it ends in an error."""

    def of(self, variables: Sequence[Variable]) -> Callable[..., bool]:
        """Return a function that reports a bad step of some variables.

        It takes the sums of this rank's own gradients, and the averaged gradients. It returns whether to
        apply the step after all, because only their sum was too large.
        """


def watch(optimizer: keras.optimizers.Optimizer, reporter: Reporter) -> None:
    """Report steps of an optimizer whose averaged gradients are not finite, before it applies them."""
    if not isinstance(optimizer, Watched):
        _mix_in(optimizer, Watched)
    optimizer._hvdrecover_reporter = reporter


def _mix_in(optimizer: keras.optimizers.Optimizer, mixin: type) -> None:
    """Add methods to an optimizer's class; the averaging comes before the guard."""
    kinds = (
        [*type(optimizer).__bases__] if isinstance(optimizer, Distributed | Watched) else [type(optimizer)]
    )
    kinds.insert(0 if mixin is Distributed else len(kinds) - 1, mixin)
    kind = kinds[-1]
    # Of the same name and module, so that Keras saves it as the same class.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, tuple(kinds), names)


class _Settings:
    """The settings of a distributed optimizer, where Keras does not look for them."""

    def __init__(self, reduction: Reduction, passes: int, divisor: int) -> None:
        self.reduction = reduction
        self.passes = passes
        self.divisor = divisor
        self.sums: Sums | None = None


class Distributed(keras.optimizers.Optimizer):  # type: ignore[misc]
    """The methods of an optimizer that averages gradients."""

    _hvdrecover: _Settings

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras clears the factor of an optimizer that it puts a LossScaleOptimizer around. A property would
        # not see that: TensorFlow skips the assignment of a value that is there already, and None is.
        if name == "loss_scale_factor" and value is None and "_hvdrecover" in vars(self):
            raise ConfigError(
                "optimizer",
                "a LossScaleOptimizer around a distributed optimizer would skip steps on some ranks only, "
                "and the other ranks would wait. Keras makes one for models of mixed_float16. Use "
                "DistributedOptimizer(LossScaleOptimizer(...))",
            )
        super().__setattr__(name, value)

    def register_local_var(self, var: Variable) -> None:
        """Leave a variable's gradient to each rank."""
        self._hvdrecover.reduction.keep_local([var])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Average gradients across the ranks, then apply them."""
        if trainable_variables is None and not self.built:
            super().apply(grads)  # which says what is missing
        settings = self._hvdrecover
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        gradients = list(grads)
        if settings.passes == 1:
            super().apply(settings.reduction(gradients, variables), trainable_variables)
            return
        if not self.built:
            self.build(variables)  # not in one branch of a condition
        if settings.sums is None:
            settings.sums = outside_of_traces(lambda: Sums(variables))
        sums = settings.sums
        sums.add(gradients)

        def step() -> tf.Tensor:
            super(Distributed, self).apply(
                settings.reduction(sums.parts(gradients, settings.divisor), variables), trainable_variables
            )
            sums.forget()
            return tf.constant(True)

        tf.cond(tf.equal(sums.count, settings.passes), step, lambda: tf.constant(False))


class Watched(keras.optimizers.Optimizer):  # type: ignore[misc]
    """The methods of an optimizer whose gradients a guard looks at."""

    _hvdrecover_reporter: Reporter

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Apply gradients, unless they are not finite.

        Only a bad step calls Python, in a graph as well. The sums cost a small model about 20 µs in a step.
        """
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        given = [numbers_of(gradient) for gradient in grads if gradient is not None]
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
        refuse_xla("what a guard does about gradients that are not finite")

        def ask() -> tf.Tensor:
            with tf.device("CPU:0"):
                return tf.py_function(report, [mine, *given], tf.bool)

        good = tf.cond(fine, lambda: tf.constant(True), ask)
        if not self._hvdrecover_reporter.skips:  # no branch is needed, which would cost two percent
            with tf.control_dependencies([good]):
                super().apply(grads, trainable_variables)
            return

        def step() -> tf.Tensor:
            super(Watched, self).apply(grads, trainable_variables)
            return tf.constant(True)

        tf.cond(good, step, lambda: tf.constant(False))


class Sums:
    """Gradients of this rank, added up over several passes.

    Args:
        variables: the variables that they are gradients of.

    Attributes:
        count: how many passes have been added up.
    """

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._sums = [tf.Variable(tf.zeros_like(raw(variable)), trainable=False) for variable in variables]

    def add(self, gradients: Sequence[Gradient]) -> None:
        """Add one pass."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        self.count.assign_add(1)

    def parts(self, gradients: Sequence[Gradient], divisor: int) -> list[Gradient]:
        """Return the sums, divided, dense; None where a gradient is None."""
        return [
            None if gradient is None else total / tf.cast(divisor, total.dtype)
            for total, gradient in zip(self._sums, gradients, strict=True)
        ]

    def forget(self) -> None:
        """Start again."""
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        self.count.assign(0)


def forget_sums(optimizer: Any) -> None:
    """Forget gradients that a rolled back step has left."""
    if isinstance(optimizer, Distributed) and optimizer._hvdrecover.sums is not None:
        optimizer._hvdrecover.sums.forget()


def passes(optimizer: Any) -> tuple[int, int]:
    """Return how many backward passes of an optimizer no step has had yet, of how many that a step has."""
    if not isinstance(optimizer, Distributed) or optimizer._hvdrecover.sums is None:
        return 0, 1
    return int(optimizer._hvdrecover.sums.count), optimizer._hvdrecover.passes
