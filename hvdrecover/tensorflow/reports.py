"""Reports of steps that hooks ask TensorFlow for."""

from __future__ import annotations

from hvdrecover.guard.missing import Missing
from hvdrecover.guard.numbers import Judge
from hvdrecover.scalars import Scalars
from hvdrecover.state.adapter import StepObserver
from hvdrecover.state.contents import Contents
from hvdrecover.tensorflow import faults, guard
from hvdrecover.tensorflow.steps import Steps


class Reports:
    """The part of `hvdrecover.state.adapter.Framework` that reports steps to hooks.

    Attributes:
        step_observers: want to know when ``model.fit`` begins a step.
        steps: measures steps, if anybody wants to know.
    """

    def __init__(self) -> None:
        self.step_observers: list[StepObserver] = []
        self.steps: Steps | None = None

    def original(self, error: BaseException) -> BaseException | None:
        """Return the error of ours that TensorFlow has made another one of, if any."""
        return faults.original(error)

    def report_steps(self, contents: Contents, observer: StepObserver) -> None:
        """Report each step of ``model.fit``."""
        self.step_observers.append(observer)

    def report_times(self, contents: Contents, scalars: Scalars) -> None:
        """Report the time of each step, and the norm of its gradients."""
        self.steps = Steps(scalars)

    def report_missing(self, contents: Contents, missing: Missing) -> None:
        """Report nothing: a gradient that is missing on some ranks is an error of `Reduction`."""

    def report_gradients(self, contents: Contents, judge: Judge) -> None:
        """Report steps whose gradients are not finite, before they are applied."""
        guard.report_gradients(contents.components(), judge)
