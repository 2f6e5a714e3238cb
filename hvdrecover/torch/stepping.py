"""The steps of an optimizer: hooked once, and reported once each, however often torch's hooks are called.

Horovod's ``step`` averages gradients by ``synchronize``, unless the script has done so, and then calls the
step of the optimizer that it wraps; hooks are called around both. Adasum has no averages: it steps for each
parameter by itself, in backward passes, and each of these is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

_Listeners = list[Callable[[], object]]


def stepping(optimizer: Any) -> Stepping:
    """Return the `Stepping` of an optimizer, made once. Its copies, and what is stored of it, have none."""
    found: Stepping | None = vars(optimizer).get("_hvdrecover_stepping")
    return Stepping(optimizer) if found is None else found


class Stepping:
    """Reports the steps of one optimizer to the listeners in its lists. Use `stepping` to have it.

    Args:
        optimizer: wrapped by ``hvd.DistributedOptimizer`` or not.

    Attributes:
        begins: called when a step begins.
        averaging: called when gradients are about to be averaged, in a step or by the script before it.
        averaged: called once they are.
        applying: called when gradients are about to be applied; they may be taken away.
        average: averages gradients; Horovod's ``synchronize``, or what takes its place.
        count: how many times gradients were about to be applied.
        counted: the count at the last heartbeat, which a hook on all optimizers sends.
    """

    def __init__(self, optimizer: Any) -> None:
        self.begins: _Listeners = []
        self.averaging: _Listeners = []
        self.averaged: _Listeners = []
        self.applying: _Listeners = []
        self.count, self.counted = 0, -1
        self._twice = hasattr(optimizer, "_synchronized") and not hasattr(optimizer, "_starting_models")
        self._begun = self._applied = self._evaluates = False
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._before)
        if hasattr(optimizer, "synchronize"):
            self.average: Callable[[], object] = optimizer.synchronize
            optimizer.synchronize = self._synchronize
        optimizer._hvdrecover_stepping = self

    @cached_property
    def ended(self) -> _Listeners:
        """Called once gradients were applied. Hooked only if somebody asks, as each hook takes time."""
        self._optimizer.register_step_post_hook(self._after)
        return []

    def _before(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        # A step that failed has not ended. With gradients under way, or averaged, this is not the rest of it.
        evaluates, self._evaluates = self._evaluates, False
        inside = self._begun and (evaluates or not (optimizer._handles or optimizer._synchronized))
        self._begun = False
        if not inside:
            for listener in self.begins:
                listener()
            self._begun = self._twice
        if not self._begun:
            self.count += 1
            self._applied = True
            if not evaluates:
                self.evaluated()

    def evaluates(self) -> None:
        """Expect the step of the optimizer that is wrapped, which evaluates a closure to get gradients."""
        self._evaluates = True

    def evaluated(self) -> None:
        """Report that gradients are about to be applied, maybe several times in a step that has a closure."""
        for listener in self.applying:
            listener()

    def _synchronize(self) -> None:
        """In the place of Horovod's, for its ``step`` and for the script."""
        begun, self._begun = self._begun, False  # as it stays if this fails
        for listener in self.averaging:
            listener()
        self.average()
        for listener in self.averaged:
            listener()
        self._begun = begun

    def _after(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self._begun = False
        if self._applied:
            self._applied = False
            for listener in self.ended:
                listener()
