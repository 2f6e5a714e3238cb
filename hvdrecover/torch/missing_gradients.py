"""Parameters that have a gradient on some ranks only, as when their layer was not called on the others.

Horovod sends zeros for them. But with ``groups``, it sends the rest of their group one by one, while ranks
that have the whole group send it at once, and wait for each other for ever. Here such a group is completed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdrecover.elastic.guard.missing import Missing
from hvdrecover.torch.names import parameters_of
from hvdrecover.torch.stepping import stepping


def watch(components: Mapping[str, Any], names: Mapping[int, str], missing: Missing) -> None:
    """Look for missing gradients whenever a Horovod-wrapped optimizer averages them.

    Args:
        components: by attribute name; optimizers are watched.
        names: of parameters, by identity.
        missing: is told.
    """
    for component in components.values():
        if isinstance(component, torch.optim.Optimizer) and hasattr(component, "synchronize"):
            _Watched(component, names, missing)


class _Watched:
    """A Horovod-wrapped optimizer."""

    def __init__(self, optimizer: Any, names: Mapping[int, str], missing: Missing) -> None:
        self._optimizer = optimizer
        self._names = names
        self._missing = missing
        self._steps = stepping(optimizer)
        self._period, self._before = -1, 0  # steps that were counted before it
        self._steps.averaging.append(self._averaging)

    def _averaging(self) -> None:
        if self._period != self._missing.period:  # a rank that came later has counted fewer
            self._period, self._before = self._missing.period, self._steps.count
        # Horovod has an entry for each parameter that had a gradient, or for each whole group of them.
        handles, groups = self._optimizer._handles, getattr(self._optimizer, "_groups", None)
        counts = self._optimizer._requires_update if groups is None else self._optimizer._group_counts
        if len(handles) != len(counts) or None in [handle for handle, _ in handles.values()]:
            self._look(handles, groups)

    def _look(self, handles: dict[Any, Any], groups: Any) -> None:
        there = {parameter for key in handles for parameter in (key if isinstance(key, tuple) else (key,))}
        absent = [
            each
            for each in parameters_of(self._optimizer)
            if each in self._optimizer._requires_update and each not in there
        ]
        if absent:
            self._missing.note(self._steps.count - self._before, [self._names[id(each)] for each in absent])
        if groups is not None:
            self._complete(handles)

    def _complete(self, handles: dict[Any, Any]) -> None:
        """Send groups that lack a gradient as the groups that they are."""
        for group in self._optimizer._group_counts:
            if group in handles or not self._optimizer._requires_update.issuperset(group):  # some are frozen
                continue
            for parameter in group:
                handles.pop(parameter, None)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            handles[group] = self._optimizer._grouped_allreduce_grad_async(group)
