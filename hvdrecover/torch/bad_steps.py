"""A look at the gradients of each step: this rank's own, and what all ranks have made of them.

Gradients that are not finite on one rank are not finite on any after the allreduce, so all ranks see a bad
step without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.elastic.guard.judge import Judge
from hvdrecover.errors import ConfigError
from hvdrecover.torch.finite import not_finite
from hvdrecover.torch.modules import Calls
from hvdrecover.torch.names import parameters_of
from hvdrecover.torch.own_gradients import Outgoing
from hvdrecover.torch.stepping import Stepping, stepping


class Gradients:
    """Looks at the gradients of optimizers that Horovod has wrapped.

    Args:
        components: by attribute name; optimizers are looked at.
        names: of parameters, by identity.
        judge: is told of bad steps.

    Raises:
        ConfigError: an optimizer that does not average gradients.
    """

    def __init__(self, components: Mapping[str, Any], names: Mapping[int, str], judge: Judge) -> None:
        self._judge = judge
        self._names = names
        self._calls = Calls(
            {name: each for name, each in components.items() if isinstance(each, torch.nn.Module)}
        )
        steps = [
            self._look_at(name, component)
            for name, component in components.items()
            if isinstance(component, torch.optim.Optimizer) and hasattr(component, "synchronize")
        ]
        judge.steps = lambda: sum(each.count for each in steps)

    def _look_at(self, name: str, optimizer: Any) -> Stepping:
        if hasattr(optimizer, "_starting_models"):
            raise ConfigError(
                f"state.{name}", "Adasum brings updates together, not gradients; pass Guard(numerics=None)"
            )
        steps = stepping(optimizer)
        steps.applying.append(partial(self._applying, optimizer, Outgoing(optimizer)))
        return steps

    def _applying(self, optimizer: Any, outgoing: Outgoing) -> None:
        scaled = getattr(optimizer, "found_inf", None) is not None  # loss scaling deals with an overflow
        if scaled or outgoing.averages_are_finite():
            self._judge.stepped()
        else:
            self._look_into([each for each in parameters_of(optimizer) if each.grad is not None], outgoing)

    def _look_into(self, given: Sequence[torch.Tensor], outgoing: Outgoing) -> None:
        """Some are not finite, or a sum of theirs; tell, and have the optimizer pass over the step."""
        by_name = {self._names[id(each)]: each for each in given}
        bad = not_finite({name: each.grad for name, each in by_name.items() if each.grad is not None})
        alone = hvd.size() == 1
        here = [name for name in bad if alone or outgoing.is_bad(by_name[name])]
        outgoing.forget()
        if not bad:
            self._judge.stepped()
            return
        first = self._calls.first_bad() if here else ""
        self._judge.gradients(bad, here, first=first)
        for parameter in given:
            parameter.grad = None  # torch's optimizers pass over what has none
