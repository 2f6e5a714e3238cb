"""Reports of steps that hooks ask torch for."""

from __future__ import annotations

import torch

from hvdrecover.guard.missing import Missing
from hvdrecover.guard.numbers import Judge
from hvdrecover.scalars import Scalars
from hvdrecover.state.adapter import StepObserver
from hvdrecover.state.contents import Contents
from hvdrecover.torch import guard
from hvdrecover.torch.scalars import watch
from hvdrecover.torch.stepping import stepping


class Reports:
    """The part of `hvdrecover.state.adapter.Framework` that reports steps to hooks."""

    def original(self, error: BaseException) -> BaseException | None:
        """Return None: torch raises errors as they are."""
        return None

    def report_steps(self, contents: Contents, observer: StepObserver) -> None:
        """Report each step of an optimizer before it begins."""
        for component in contents.components().values():
            if isinstance(component, torch.optim.Optimizer):
                stepping(component).begins.append(observer.step_begins)

    def report_times(self, contents: Contents, scalars: Scalars) -> None:
        """Report the time of each step, and the norm of its gradients."""
        watch(contents.components(), scalars)

    def report_missing(self, contents: Contents, missing: Missing) -> None:
        """Report parameters that had no gradient at a step."""
        guard.report_missing(contents.components(), missing)

    def report_gradients(self, contents: Contents, judge: Judge) -> None:
        """Report steps whose gradients are not finite, before they are applied."""
        guard.report_gradients(contents.components(), judge)
