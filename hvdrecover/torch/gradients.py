"""A look at the gradients of each step: this rank's own as they come, and what all ranks have made of them.

torch calls hooks of ours when a parameter's gradient is complete, before Horovod's sends it off, and again
before an optimizer steps. Gradients that are not finite on one rank are not finite on any after the
allreduce, so all ranks see a bad step without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.elastic.guard.judge import Judge
from hvdrecover.errors import ConfigError
from hvdrecover.torch.finite import all_finite, not_finite, total
from hvdrecover.torch.modules import Calls
from hvdrecover.torch.names import parameters_of

_LARGE = 1 << 16  # elements; to go through fewer costs less than to tell whether it is needed


class Gradients:
    """Looks at the gradients of optimizers that Horovod has wrapped.

    Each rank goes through its own gradients once. It makes the first number of a large one NaN if there is
    any that is not finite, so that after the allreduce a look at the first number is enough.

    Args:
        components: by attribute name; optimizers are looked at.
        names: of parameters, by identity.
        judge: is told of bad steps.

    Raises:
        ConfigError: an optimizer that does not average gradients.
    """

    def __init__(self, components: Mapping[str, Any], names: Mapping[int, str], judge: Judge) -> None:
        self._judge = judge
        self._steps = 0
        judge.steps = lambda: self._steps
        self._names = names
        self._totals: dict[torch.Tensor, torch.Tensor] = {}  # of this rank's own gradients
        self._plain: set[torch.Tensor] = set()  # whose sums need no precaution
        self._first: dict[torch.Tensor, tuple[int, ...]] = {}  # where large ones have their first number
        self._calls = Calls(
            {name: each for name, each in components.items() if isinstance(each, torch.nn.Module)}
        )
        for name, component in components.items():
            if isinstance(component, torch.optim.Optimizer) and hasattr(component, "synchronize"):
                self._look_at(name, component)

    def _look_at(self, name: str, optimizer: Any) -> None:
        if hasattr(optimizer, "_starting_models"):
            raise ConfigError(
                f"state.{name}", "Adasum brings updates together, not gradients; pass Guard(numerics=None)"
            )
        optimizer.register_step_pre_hook(self._before)
        compressed = optimizer._compression is not hvd.Compression.none  # what is sent may overflow
        for parameter in parameters_of(optimizer):
            if not parameter.requires_grad:
                continue
            # Elsewhere than on the CPU, to go through it is fast, and to wait for what it says is not.
            wide = parameter.dtype in (torch.float32, torch.float64)
            if parameter.numel() > _LARGE and parameter.is_cpu and wide and not compressed:
                self._first[parameter] = (0,) * parameter.dim()
            elif wide:
                self._plain.add(parameter)
            arrived = self._plain_arrived if parameter in self._plain else self._arrived
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def _plain_arrived(self, parameter: torch.Tensor) -> None:
        """A gradient of this rank's own is complete; here every microsecond counts."""
        if (gradient := parameter.grad) is not None:
            self._totals[parameter] = gradient.sum()

    def _arrived(self, parameter: torch.Tensor) -> None:
        """The same, where more has to be minded."""
        gradient = parameter.grad
        if gradient is None:
            return
        self._totals[parameter] = own = total(gradient)
        if parameter in self._first and not math.isfinite(own.item()) and not gradient.is_sparse:
            gradient[self._first[parameter]] = math.nan

    def _before(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Before a step; for Horovod's optimizers that is twice: before and after gradients are averaged."""
        if optimizer._handles or getattr(optimizer, "found_inf", None) is not None:
            return  # not averaged yet; or loss scaling has found an overflow, and deals with it
        given = [each for each in parameters_of(optimizer) if each.grad is not None]
        if not given:
            return
        self._steps += 1
        if not all_finite([self._glance(each) for each in given]):
            self._look_into(given)
        self._totals.clear()

    def _glance(self, parameter: torch.Tensor) -> torch.Tensor:
        """A number that is not finite if the averaged gradient isn't."""
        gradient = parameter.grad
        assert gradient is not None
        if parameter in self._plain:
            return gradient.sum()
        first = self._first.get(parameter)
        return total(gradient) if first is None or gradient.is_sparse else gradient[first]

    def _look_into(self, given: Sequence[torch.Tensor]) -> None:
        """Something seems not to be finite; if so, tell, and have the optimizer pass over the step."""
        by_name = {self._names[id(each)]: each for each in given}
        bad = not_finite({name: each.grad for name, each in by_name.items() if each.grad is not None})
        if not bad:
            return
        own = [name for name in bad if by_name[name] in self._totals]
        here = [name for name in own if not math.isfinite(self._totals[by_name[name]].item())]
        self._totals.clear()
        first = self._calls.first_bad() if here else ""
        self._judge.gradients(bad, here, first=first, batch_size=self._calls.batch_size())
        for parameter in given:
            parameter.grad = None  # torch's optimizers pass over what has none
