"""Keras optimizers whose steps are hooked, in ``model.fit`` and in loops of the user's own.

An optimizer gets another class of the same name, whose `apply` does, in this order:

1. If the optimizer was made distributed: add up the gradients of several passes, and average them.
2. If the state has a guard: look at the averaged gradients.
3. Apply them as the optimizer does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdrecover.errors import ConfigError
from hvdrecover.guard.numbers import Judge
from hvdrecover.tensorflow.averaging import Reduction, numbers_of, own, sums_of
from hvdrecover.tensorflow.collectives import in_python, outside_of_traces, refuse_xla, taking_what
from hvdrecover.tensorflow.variables import Gradient, Layers, Variable, named, raw, weights_of


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
        use_locking: ignored; optimizers of TensorFlow 1 have locks.
        options: see `hvdrecover.tensorflow.averaging.Reduction`.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "optimizer",
            f"expected one of keras.optimizers, got {type(optimizer).__name__}. With TensorFlow 1's "
            "optimizers and sessions, start the job with --no-stand-in: after a fault, all ranks start again",
        )
    if is_distributed(optimizer):
        raise ConfigError("optimizer", "it averages gradients already; make it distributed once")
    if backward_passes_per_step < 1:
        problem = f"must be an integer ≥ 1, got {backward_passes_per_step!r}"
        raise ConfigError("backward_passes_per_step", problem)
    hooks = _hook(optimizer)
    hooks.reduction = Reduction(**options)
    hooks.reduction.keep_local(weights_of(local_layers))
    hooks.passes = backward_passes_per_step
    hooks.divisor = backward_passes_per_step if average_aggregated_gradients else 1
    return optimizer


DistributedOptimizer = taking_what(hvd.DistributedOptimizer, distribute)
"""See `distribute`; it takes what Horovod's takes.

Examples:
    >>> optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1))
"""


@dataclass(eq=False)
class _Hooks:
    """What happens before an optimizer's step; Keras does not look into it."""

    reduction: Reduction | None = None
    passes: int = 1  # for a step
    divisor: int = 1
    count: Any = None  # of passes whose gradients ``sums`` holds; the first pass makes both
    sums: list[tf.Variable] = field(default_factory=list)
    judge: Judge | None = None
    names: Mapping[int, str] = field(default_factory=dict)  # by the identities of variables, for the judge

    def make_sums(self, variables: Sequence[Variable]) -> None:
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.sums = [tf.Variable(tf.zeros_like(raw(variable)), trainable=False) for variable in variables]

    def forget_sums(self) -> None:  # also those that a rolled back step has left
        if self.count is not None:
            for each in (*self.sums, self.count):
                each.assign(tf.zeros_like(each))


def _hook(optimizer: keras.optimizers.Optimizer) -> _Hooks:
    if not isinstance(optimizer, Hooked):
        kind = type(optimizer)
        # Of the same name and module, so that Keras saves it as the same class.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        optimizer.__class__ = type(kind.__name__, (Hooked, kind), names)
        optimizer._hvdrecover = _Hooks()
    hooks: _Hooks = optimizer._hvdrecover
    return hooks


class Hooked(keras.optimizers.Optimizer):  # type: ignore[misc]
    _hvdrecover: _Hooks

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras clears the factor of an optimizer that it puts a LossScaleOptimizer around. A property would
        # not see that: TensorFlow skips the assignment of a value that is there already, and None is.
        if name == "loss_scale_factor" and value is None and is_distributed(self):
            raise ConfigError(
                "optimizer",
                "a LossScaleOptimizer around a distributed optimizer would skip steps on some ranks only, "
                "and the other ranks would wait. Keras makes one for models of mixed_float16. Use "
                "DistributedOptimizer(LossScaleOptimizer(...))",
            )
        super().__setattr__(name, value)

    def register_local_var(self, var: Variable) -> None:
        if self._hvdrecover.reduction is not None:
            self._hvdrecover.reduction.keep_local([var])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None) -> None:
        if trainable_variables is None and not self.built:
            super().apply(grads)  # raises Keras's own error: the variables are missing
        hooks, reduction, gradients = self._hvdrecover, self._hvdrecover.reduction, list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if reduction is None or hooks.passes == 1:
            self._apply_if_finite(reduction(gradients, variables) if reduction else gradients, variables)
            return
        if not self.built:
            self.build(variables)  # not in one branch of a condition
        if hooks.count is None:
            outside_of_traces(lambda: hooks.make_sums(variables))
        pairs = list(zip(hooks.sums, gradients, strict=True))
        for total, gradient in pairs:
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))

        def step() -> tf.Tensor:
            parts = [
                None if each is None else total / tf.cast(hooks.divisor, total.dtype) for total, each in pairs
            ]
            self._apply_if_finite(reduction(parts, variables), variables)
            hooks.forget_sums()
            return tf.constant(True)

        tf.cond(tf.equal(hooks.count.assign_add(1), hooks.passes), step, lambda: tf.constant(False))

    def _apply_if_finite(self, grads: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Apply averaged gradients; only if a guard finds that they are not finite, call Python."""
        judge, names = self._hvdrecover.judge, self._hvdrecover.names
        theirs = [each for each, gradient in zip(variables, grads, strict=True) if gradient is not None]
        mine = own.of(theirs) if judge is not None and theirs and self.built else None
        if judge is None or mine is None:  # no guard, or not averaged by us: other ranks may see others
            super().apply(grads, variables)
            return
        there = [numbers_of(gradient) for gradient in grads if gradient is not None]
        known = [names.get(id(raw(each)), str(each.name)) for each in theirs]
        report = functools.partial(_report, judge, known)
        # The sums cost a small model about 20 µs in a step.
        fine = tf.math.is_finite(tf.reduce_sum(sums_of(there)))
        if tf.executing_eagerly():
            if bool(fine) or report(mine, *there):
                super().apply(grads, variables)
            return
        refuse_xla()

        good = tf.cond(fine, lambda: tf.constant(True), lambda: in_python(report, [mine, *there], tf.bool))
        if judge.policy != "skip":  # no branch is needed, which would cost two percent
            with tf.control_dependencies([good]):
                super().apply(grads, variables)
            return

        def step() -> tf.Tensor:
            super(Hooked, self).apply(grads, variables)
            return tf.constant(True)

        tf.cond(good, step, lambda: tf.constant(False))


def report_gradients(components: Mapping[str, Any], judge: Judge) -> None:
    """Look at averaged gradients before each step of the Keras optimizers."""
    optimizers, names = [], dict[int, str]()
    for name, component in components.items():
        if isinstance(component, keras.optimizers.Optimizer):
            optimizers.append(component)
        else:
            names |= {id(variable): f"{name}.{inner}" for inner, variable in named(component).items()}
    for optimizer in optimizers:
        # A LossScaleOptimizer has overflows as a matter of course, and skips them itself.
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            continue
        needed = hooks_of(optimizer).passes
        if judge.policy == "rollback" and needed > 1:
            raise ConfigError(
                "numerics",
                f"'rollback' leaves out one bad batch, but with backward_passes_per_step={needed} a step "
                "sums up several batches. Pass Guard(numerics='skip')",
            )
        own.wanted = True
        judge.steps = lambda optimizer=optimizer: int(optimizer.iterations)  # type: ignore[misc]
        hooks = _hook(optimizer)
        hooks.judge, hooks.names = judge, names


def _report(judge: Judge, names: Sequence[str], mine: tf.Tensor, *averages: tf.Tensor) -> bool:
    """Report averaged gradients that are not finite to the guard; return whether to apply the step."""
    bad = [name for name, each in zip(names, averages, strict=True) if not np.isfinite(each.numpy()).all()]
    if not bad:  # only a sum was too large
        return True
    sent = dict(zip(names, np.isfinite(mine.numpy()).tolist(), strict=True))
    judge.gradients(bad, [name for name in bad if not sent[name]])
    return False


def is_distributed(optimizer: Any) -> bool:
    return hooks_of(optimizer).reduction is not None


def hooks_of(optimizer: Any) -> _Hooks:
    found: _Hooks | None = getattr(optimizer, "_hvdrecover", None) if isinstance(optimizer, Hooked) else None
    return found or _Hooks()
