"""The guard in torch: gradients that are missing or not finite."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
import torch.utils.data

from hvdrecover.errors import ConfigError
from hvdrecover.guard.numbers import Judge, Missing
from hvdrecover.torch.optimizers import names_of, parameters_of
from hvdrecover.torch.stepping import WIDE, averages, is_adasum, steps_of

try:
    from hvdrecover.torch._finite import are_finite as _compiled
except ImportError:  # the package was installed without a C compiler
    _compiled = None  # type: ignore[assignment]

# -- numbers that are not finite ---------------------------------------------------------------------------

# Returns whether tensors hold finite numbers only; None if it does not know. For six small
# gradients it takes 15 µs, torch's own operations 130 µs, on a busy machine; a step of that model takes 3 ms.
_table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
look: Callable[..., bool | None] = lambda *tensors: None  # noqa: E731
if _compiled is not None and _table is not None:
    look = functools.partial(_compiled, _table)


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors hold finite numbers only. If they are very large, the answer may be no."""
    held = [_values(each) for each in tensors]
    return math.isfinite(torch.nn.utils.get_total_norm(held).item())  # one operation for all of a device


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    # A sum takes any dtype, and no memory. It is not finite if one of its terms is not, or if they are large.
    totals: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for each in map(_total, tensors.values()):
        totals[each.device, each.dtype].append(each)
    if all(math.isfinite(torch.stack(each).sum().item()) for each in totals.values()):
        return []
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(_values(tensor)).all())]


def _total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's numbers, in float32 at least; nothing is waited for."""
    held = _values(tensor)
    return held.sum(dtype=torch.float32) if held.itemsize < 4 else held.sum()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor: of a sparse one those that are not zero, of complex ones both parts."""
    held = tensor.detach()
    if held.is_sparse:
        held = held._values()
    return torch.view_as_real(held) if held.is_complex() else held


_LARGE = 1 << 14  # elements; a second look at fewer costs next to nothing


class GradientWatch:
    """Looks at the gradients of one optimizer: at this rank's when they are sent, and at the averages."""

    def __init__(self, optimizer: Any, name_of: Callable[[torch.Tensor], str], judge: Judge) -> None:
        self._optimizer = optimizer
        self._name_of = name_of
        self._judge = judge
        judge.knows_steps = True
        # Sums of this rank's gradients that are not finite, or are still being computed; by parameter.
        self._suspects: dict[torch.Tensor, torch.Tensor] = {}
        # Horovod sends nothing in a job of one that is not elastic. Compressed gradients may overflow later.
        sends = hasattr(optimizer, "_later_hooks") or hasattr(optimizer, "virtual_gradients")
        self._marks = sends and optimizer._compression is hvd.Compression.none
        steps_of(optimizer).sending.append(self._sending)
        steps_of(optimizer).applying.append(self._applying)

    def _sending(self, parameter: torch.Tensor) -> None:
        # The average overwrites this rank's gradient. Large gradients on the CPU are checked only here, as a
        # second pass through memory would cost 1% of a step. If one is not finite, its first number is set to
        # NaN, so that all ranks find NaN there in the average. On other devices the averages are checked as a
        # whole: that is fast there, but to wait for each check is not.
        gradient = parameter.grad
        if gradient is None or look(gradient):  # Horovod makes a missing gradient, of zeros
            return
        total = _total(gradient)
        if total.is_cpu:  # elsewhere, nothing is waited for
            if math.isfinite(total.item()):
                return
            if self._is_marked(parameter, gradient):
                gradient[_first(gradient)] = math.nan
        if (parts := self._suspects.get(parameter)) is not None:  # of the virtual ranks before
            total += parts
        self._suspects[parameter] = total

    def _is_marked(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Return whether a bad gradient is marked by its first number, so that a look at that is enough."""
        return (
            parameter.numel() > _LARGE
            and self._marks
            and parameter.dtype in WIDE
            and parameter.is_cpu
            and not gradient.is_sparse
        )

    def _applying(self) -> None:
        # Loss scaling deals with an overflow.
        if getattr(self._optimizer, "found_inf", None) is None and not self._averages_are_finite():
            parameters = [each for each in parameters_of(self._optimizer) if each.grad is not None]
            named = {self._name_of(each): each for each in parameters}
            bad = not_finite({name: each.grad for name, each in named.items() if each.grad is not None})
            if bad:
                sent = {name: self._suspects.get(named[name]) for name in bad}
                mine = [name for name, each in sent.items() if each is not None and not each.isfinite()]
                self._suspects.clear()
                self._judge.gradients(bad, bad if hvd.size() == 1 else mine)
                for parameter in parameters:
                    parameter.grad = None  # torch's optimizers skip a parameter without a gradient
                return
        self._suspects.clear()
        self._judge.stepped()

    def _averages_are_finite(self) -> bool:
        averages = [
            gradient[_first(gradient)] if self._is_marked(each, gradient) else gradient
            for each in parameters_of(self._optimizer)
            if (gradient := each.grad) is not None
        ]
        finite = look(*averages)
        return are_finite(averages) if finite is None else finite


def _first(tensor: torch.Tensor) -> tuple[int, ...]:
    """The place of a tensor's first number."""
    return (0,) * tensor.dim()


def report_gradients(components: Mapping[str, Any], judge: Judge) -> None:
    """Tell the judge of steps of Horovod-wrapped optimizers whose gradients are not finite."""
    for name, component in components.items():
        if isinstance(component, torch.optim.Optimizer) and is_adasum(component):
            raise ConfigError(
                f"state.{name}", "Adasum brings updates together, not gradients; pass Guard(numerics=None)"
            )
    for optimizer in _wrapped(components):
        GradientWatch(optimizer, names_of(components), judge)


def _wrapped(components: Mapping[str, Any]) -> list[Any]:
    return [
        each for each in components.values() if isinstance(each, torch.optim.Optimizer) and averages(each)
    ]


# -- missing gradients -------------------------------------------------------------------------------------


def report_missing(components: Mapping[str, Any], missing: Missing) -> None:
    """Count the gradients that are missing when a Horovod-wrapped optimizer averages."""
    for optimizer in _wrapped(components):
        look_for = functools.partial(_averaging, optimizer, names_of(components), missing)
        steps_of(optimizer).averaging.append(look_for)


def _averaging(optimizer: Any, name_of: Callable[[torch.Tensor], str], missing: Missing) -> None:
    # Horovod has an entry for each parameter that had a gradient, or for each whole group of them.
    handles, groups = optimizer._handles, getattr(optimizer, "_groups", None)
    counts = optimizer._requires_update if groups is None else optimizer._group_counts
    if len(handles) == len(counts) and None not in [handle for handle, _ in handles.values()]:
        return
    there = {parameter for key in handles for parameter in (key if isinstance(key, tuple) else (key,))}
    for each in parameters_of(optimizer):
        if each in optimizer._requires_update and each not in there:
            missing.steps[name_of(each)] += 1
    if groups is not None:
        _complete_groups(optimizer)


def _complete_groups(optimizer: Any) -> None:
    """Send groups that lack a gradient as whole groups."""
    # Horovod would send their tensors one by one, while ranks that have the whole group send it at once: all
    # would wait for each other for ever.
    handles = optimizer._handles
    for group in optimizer._group_counts:
        if group in handles or not optimizer._requires_update.issuperset(group):  # some are frozen
            continue
        for parameter in group:
            handles.pop(parameter, None)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        handles[group] = optimizer._grouped_allreduce_grad_async(group)
