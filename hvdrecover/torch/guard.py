"""The guard in torch: structure, gradients that are missing or not finite."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import horovod.torch as hvd
import torch
import torch.utils.data

from hvdrecover.errors import ConfigError
from hvdrecover.guard.numbers import Judge, Missing
from hvdrecover.state.adapter import Entry
from hvdrecover.torch.optimizers import by_name, parameters_of
from hvdrecover.torch.stepping import averages, is_adasum, steps_of

try:
    from hvdrecover.torch._finite import are_finite as _compiled
except ImportError:  # the package was installed without a C compiler
    _compiled = None  # type: ignore[assignment]

# -- structure ---------------------------------------------------------------------------------------------


def describe(component: Any) -> list[Entry]:
    """A module's parameters and buffers, or the kind and the settings of an optimizer or a scheduler."""
    if isinstance(component, torch.nn.Module):
        parameters = [
            Entry(f".{name}", f"{_kind(each)}, {'trained' if each.requires_grad else 'frozen'}")
            for name, each in component.named_parameters(remove_duplicate=False)
        ]
        buffers = component.named_buffers()
        return parameters + [Entry(f".{name}", f"{_kind(each)}, a buffer") for name, each in buffers]
    # Horovod's wrapper of an optimizer has the name of the class that it wraps.
    entries = [Entry("", f"a {type(component).__name__}")]
    if isinstance(component, torch.optim.Optimizer):
        for number, group in enumerate(component.param_groups):
            entries.append(Entry(f".param_groups.{number}", f"{len(group['params'])} parameters"))
            settings = {name: value for name, value in group.items() if name != "params"}
            entries += _settings(f".param_groups.{number}.", settings)
    if isinstance(component, torch.optim.lr_scheduler.LRScheduler):
        state = component.state_dict().items()
        entries += _settings(
            ".", {name: value for name, value in state if not name.startswith("_") and name != "last_epoch"}
        )
    return entries


def _kind(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "not yet known"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _settings(prefix: str, values: Mapping[str, Any]) -> list[Entry]:
    return [
        Entry(
            f"{prefix}{name}",
            str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value),
            setting=True,
            stored=True,
        )
        for name, value in sorted(values.items())
    ]


# -- names of parameters ------------------------------------------------------------------------------------


class Names(dict[int, str]):
    """Names of parameters, by identity: ``model.0.weight``, or ``optimizer's parameter 2``.

    Parameters that optimizers have got later are looked up when somebody asks for them.
    """

    def __init__(self, components: Mapping[str, Any]) -> None:
        super().__init__()
        self._components = components
        self._look()

    def __missing__(self, key: int) -> str:
        self._look()
        return self.get(key, "a parameter without a name")

    def _look(self) -> None:
        self.update({id(each): name for name, each in by_name(self._components).items()})
        for name, component in self._components.items():
            if isinstance(component, torch.optim.Optimizer):
                for number, each in enumerate(parameters_of(component)):
                    self.setdefault(id(each), f"{name}'s parameter {number}")


# -- numbers that are not finite ---------------------------------------------------------------------------

# Returns whether tensors, or None, hold finite numbers only; None if it does not know. For six small
# gradients it takes 15 µs, torch's own operations 130 µs, on a busy machine; a step of that model takes 3 ms.
_table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
look: Callable[..., bool | None] = lambda *tensors: None  # noqa: E731
if _compiled is not None and _table is not None:
    look = functools.partial(_compiled, _table)


def are_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether tensors hold finite numbers only. If they are very large, the answer may be no."""
    held = [_values(each) for each in tensors if each is not None]
    return math.isfinite(torch.nn.utils.get_total_norm(held).item())  # one operation for all of a device


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
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
_gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class GradientWatch:
    """Looks at the gradients of one optimizer: at this rank's when they are sent, and at the averages.

    The average overwrites this rank's gradient. Large gradients on the CPU are checked only when they are
    sent, as a second pass through memory would cost 1% of a step. If one is not finite, its first number is
    set to NaN, so that all ranks find NaN there in the average. On other devices the averages are checked as
    a whole: that is fast there, but to wait for each check is not.
    """

    def __init__(self, optimizer: Any, names: Names, judge: Judge) -> None:
        self.steps = 0
        self._optimizer = optimizer
        self._names = names
        self._judge = judge
        self._bad: set[int] = set()  # parameters, by identity, whose gradients here were not finite
        self._totals: dict[int, torch.Tensor] = {}  # sums of gradients, maybe still being computed
        self._large: dict[int, torch.Tensor] = {}
        self._others: list[torch.Tensor] = []
        steps_of(optimizer).begins.append(self._count)
        steps_of(optimizer).sending.append(self._sending)
        steps_of(optimizer).applying.append(self._applying)

    def _count(self) -> None:
        self.steps += 1

    def _sending(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:  # Horovod makes one of zeros
            return
        finite = look(gradient)
        if finite is None:
            self._totals[id(parameter)] = own = _total(gradient)
            finite = not own.is_cpu or math.isfinite(own.item())  # elsewhere, nothing is waited for
        if not finite:
            self._bad.add(id(parameter))
            if not (self._large or self._others):
                self._sort()
            if id(parameter) in self._large and not gradient.is_sparse:
                gradient[_first(gradient)] = math.nan

    def _applying(self) -> None:
        parameters = [*parameters_of(self._optimizer)]
        scaled = (
            getattr(self._optimizer, "found_inf", None) is not None
        )  # loss scaling deals with an overflow
        if not scaled and not self._averages_are_finite(len(parameters)):
            given = {self._names[id(each)]: each for each in parameters if each.grad is not None}
            bad = not_finite({name: each.grad for name, each in given.items() if each.grad is not None})
            here = [name for name in bad if hvd.size() == 1 or self._is_bad(given[name])]
            self._forget()
            if bad:
                self._judge.gradients(bad, here)
                for parameter in given.values():
                    parameter.grad = None  # torch's optimizers skip a parameter without a gradient
                return
        self._judge.stepped()

    def _is_bad(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank has sent a gradient that was not finite, or whose sum was not."""
        own = self._totals.get(id(parameter))
        return id(parameter) in self._bad or (own is not None and not math.isfinite(own.item()))

    def _averages_are_finite(self, count: int) -> bool:
        """Return whether no rank seems to have sent a bad number; then forget the gradients of this step."""
        if len(self._large) + len(self._others) != count:
            self._sort()  # at first, and when some were added
        averages = [*map(_gradient_of, self._others)]
        for each in self._large.values():
            if (gradient := each.grad) is not None:
                averages.append(gradient if gradient.is_sparse else gradient[_first(gradient)])
        finite = look(*averages)
        if finite is None:
            finite = are_finite(averages)
        if finite:
            self._forget()
        return finite

    def _forget(self) -> None:
        self._totals.clear()
        self._bad.clear()

    def _sort(self) -> None:
        """Tell large parameters from others."""
        # Horovod sends nothing in a job of one that is not elastic. Compressed gradients may overflow later.
        sent = hasattr(self._optimizer, "_later_hooks") or hasattr(self._optimizer, "virtual_gradients")
        kept = sent and self._optimizer._compression is hvd.Compression.none
        self._large, self._others = {}, []
        for each in parameters_of(self._optimizer):
            wide = each.dtype in (torch.float32, torch.float64)
            if kept and each.is_cpu and each.numel() > _LARGE and wide:
                self._large[id(each)] = each
            else:
                self._others.append(each)


def _first(tensor: torch.Tensor) -> tuple[int, ...]:
    """The place of a tensor's first number."""
    return (0,) * tensor.dim()


def report_gradients(components: Mapping[str, Any], judge: Judge) -> None:
    """Tell the judge of steps of Horovod-wrapped optimizers whose gradients are not finite."""
    names, watched = Names(components), []
    for name, optimizer in components.items():
        if isinstance(optimizer, torch.optim.Optimizer) and is_adasum(optimizer):
            raise ConfigError(
                f"state.{name}", "Adasum brings updates together, not gradients; pass Guard(numerics=None)"
            )
        if isinstance(optimizer, torch.optim.Optimizer) and averages(optimizer):
            watched.append(GradientWatch(optimizer, names, judge))
    judge.steps = lambda: sum(each.steps for each in watched)


# -- missing gradients -------------------------------------------------------------------------------------


def report_missing(components: Mapping[str, Any], missing: Missing) -> None:
    """Count the gradients that are missing when a Horovod-wrapped optimizer averages."""
    names = Names(components)
    for optimizer in components.values():
        if isinstance(optimizer, torch.optim.Optimizer) and averages(optimizer):
            look_for = functools.partial(_averaging, optimizer, names, missing)
            steps_of(optimizer).averaging.append(look_for)


def _averaging(optimizer: Any, names: Names, missing: Missing) -> None:
    # Horovod has an entry for each parameter that had a gradient, or for each whole group of them.
    handles, groups = optimizer._handles, getattr(optimizer, "_groups", None)
    counts = optimizer._requires_update if groups is None else optimizer._group_counts
    if len(handles) == len(counts) and None not in [handle for handle, _ in handles.values()]:
        return
    there = {parameter for key in handles for parameter in (key if isinstance(key, tuple) else (key,))}
    for each in parameters_of(optimizer):
        if each in optimizer._requires_update and each not in there:
            missing.steps[names[id(each)]] += 1
    if groups is not None:
        _complete_groups(optimizer)


def _complete_groups(optimizer: Any) -> None:
    """Send groups that lack a gradient as whole groups.

    Horovod would send their tensors one by one, while ranks that have the whole group send it at once: all
    would wait for each other for ever.
    """
    handles = optimizer._handles
    for group in optimizer._group_counts:
        if group in handles or not optimizer._requires_update.issuperset(group):  # some are frozen
            continue
        for parameter in group:
            handles.pop(parameter, None)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        handles[group] = optimizer._grouped_allreduce_grad_async(group)
