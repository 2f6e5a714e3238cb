"""The steps of optimizers: reports of them, and additions to Horovod's ``DistributedOptimizer``.

A step of a ``DistributedOptimizer``, and when the lists of its `Steps` are called:

1. ``begins``.
2. ``averaging``, Horovod's averages of all gradients, ``averaged``. The script may do this before the step,
   by ``synchronize``. A closure does it at each evaluation.
3. ``applying``: the optimizer that is wrapped is about to apply the gradients. A listener may take them away.
4. ``ended``.

Other optimizers report 1, 3 and 4. Adasum has no averages: it steps for each parameter by itself, in backward
passes, and reports each of these steps.

To wrap an optimizer, Horovod makes a new class from the attributes that its own classes have at that time. So
an optimizer that is wrapped after `hvdrecover.torch` was imported reports its steps, and has these additions:

- ``step(closure)`` averages the gradients of each evaluation before they are used. Horovod's averages first
  and then calls the closure, whose gradients each rank would apply as they are.
- Parameters that are added by ``add_param_group``, or begin to require gradients, are averaged. Horovod hooks
  only those that require gradients when the optimizer is wrapped. Frozen ones are no longer given zeros as
  gradients, by which weight decay and momentum would move them.
- ``zero_grad`` takes the arguments of the optimizer that is wrapped.
- Gradients of bfloat16, and of other memory formats, are sent as what Horovod can send.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.compression import FP16Compressor, NoneCompressor
from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError
from hvdrecover.scalars import Scalars
from hvdrecover.torch.optimizers import by_name, parameters_of, plain

Listeners = list[Callable[[], object]]

WIDE = (torch.float32, torch.float64)
_NO_NAME = "allreduce.noname."  # Horovod's, before the places of group and parameter

_horovods_synchronize = _DistributedOptimizer.synchronize
_horovods_send = _DistributedOptimizer._allreduce_grad_async
_horovods_send_group = _DistributedOptimizer._grouped_allreduce_grad_async
_horovods_register = _DistributedOptimizer._register_hooks
_adasums_step = _DistributedAdasumOptimizer.step


def extend() -> None:
    """Replace methods of Horovod's classes; called once, when `hvdrecover.torch` is imported."""
    _DistributedOptimizer.step = _step
    _DistributedOptimizer.synchronize = _synchronize
    _DistributedOptimizer._allreduce_grad_async = _reporting(_horovods_send)
    _DistributedOptimizer._grouped_allreduce_grad_async = _reporting(_horovods_send_group)
    _DistributedOptimizer.add_param_group = _add_param_group
    _DistributedOptimizer.forget_parameter = _forget_parameter
    _DistributedOptimizer._register_hooks = _register_hooks
    _DistributedAdasumOptimizer.step = _adasum_step
    for kind in (_DistributedOptimizer, _DistributedAdasumOptimizer):
        kind.zero_grad = _zero_grad(kind.zero_grad)
    NoneCompressor.compress, NoneCompressor.decompress = staticmethod(_widen), staticmethod(_narrow)
    for each in (NoneCompressor, FP16Compressor):
        each.compress = staticmethod(_contiguous(each.compress))
    if heartbeat.watched():
        register_optimizer_step_post_hook(_beat)


# -- reports -----------------------------------------------------------------------------------------------


class Steps:
    """The listeners to the steps of one optimizer."""

    def __init__(self) -> None:
        # Called with each parameter whose gradient is about to be sent, or added up here.
        self.sending: list[Callable[[torch.Tensor], object]] = []
        lists: list[Listeners] = [[], [], [], [], []]
        self.begins, self.averaging, self.averaged, self.applying, self.ended = lists


def steps_of(optimizer: Any) -> Steps:
    """Return the listeners of an optimizer. Copies of the optimizer have none."""
    steps: Steps | None = vars(optimizer).get("_hvdrecover_steps")
    if steps is None:
        if averages(optimizer) and not _is_extended(optimizer):
            raise ConfigError(
                "DistributedOptimizer",
                "the optimizer was wrapped before hvdrecover.torch was imported, so its steps are not seen; "
                "import hvdrecover.torch at the top of the script",
            )
        steps = optimizer._hvdrecover_steps = Steps()
        if not averages(optimizer):  # `_step` reports by itself; torch calls the hooks of those twice
            optimizer.register_step_pre_hook(lambda *_: tell(steps.begins, steps.applying))
            optimizer.register_step_post_hook(lambda *_: tell(steps.ended))
    return steps


def averages(optimizer: Any) -> bool:
    """Return whether an optimizer averages gradients over the ranks, as Adasum does not."""
    return hasattr(optimizer, "synchronize") and not is_adasum(optimizer)


def is_adasum(optimizer: Any) -> bool:
    """Return whether an optimizer was wrapped with ``op=hvd.Adasum``."""
    return hasattr(optimizer, "_starting_models")


def tell(*listeners: Listeners) -> None:
    for each in listeners:
        for listener in each:
            listener()


def _is_extended(optimizer: Any) -> bool:
    return hasattr(optimizer, "forget_parameter")


def _beat(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if not _is_extended(optimizer):  # `_step` reports its steps
        heartbeat.stepped()


# -- times of steps, and norms of gradients -----------------------------------------------------------------


def report_times(components: Mapping[str, Any], scalars: Scalars) -> None:
    """Report the norms of gradients, and the times of steps. A step ends when the first optimizer's does."""
    optimizers = {name: each for name, each in components.items() if isinstance(each, torch.optim.Optimizer)}
    norms: dict[str, torch.Tensor] = {}  # of the step under way
    for name, optimizer in optimizers.items():
        tag = "norm/averaged_gradient" + (f"/{name}" if len(optimizers) > 1 else "")
        _report_times(optimizer, scalars, norms, tag)

    for optimizer in [*optimizers.values()][:1]:
        steps_of(optimizer).ended += [lambda: scalars.stepped(norms), norms.clear]


def _report_times(optimizer: Any, scalars: Scalars, norms: dict[str, torch.Tensor], tag: str) -> None:
    def begins() -> None:
        # The guard may exchange votes from here on, and this rank waits for the others in them as well.
        if getattr(optimizer, "_handles", None):
            scalars.waiting()

    def averaged() -> None:
        """Take the norm of the averages before the script clips them."""
        scalars.arrived()
        gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
        # One fused call takes all dense gradients whose squares cannot overflow.
        parts = [each if each.dtype in WIDE and not each.is_sparse else _norm(each) for each in gradients]
        if parts:
            norms[tag] = torch.nn.utils.get_total_norm(parts)

    steps = steps_of(optimizer)
    steps.begins.append(begins)
    steps.averaging.append(scalars.waiting)
    if averages(optimizer):
        steps.averaged.append(averaged)
    elif not is_adasum(optimizer):  # a plain optimizer applies its gradients as they are
        steps.applying.append(averaged)


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    wide = None if values.dtype in WIDE or values.is_complex() else torch.float32
    return torch.linalg.vector_norm(values, dtype=wide)  # type: ignore[no-any-return]


# -- steps -------------------------------------------------------------------------------------------------


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    steps = steps_of(self)
    if hasattr(self, "virtual_gradients"):
        self.virtual_gradients.require_finished()
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure)",
                "virtual ranks sum up gradients before the step, so a closure cannot compute them again. "
                "Call backward() in the parts, and then step() without a closure",
            )
    tell(steps.begins)

    def averaged() -> Any:
        assert closure is not None
        loss = closure()
        wait = _average_loss(self, loss)
        # Lightning, for one, averages inside the closure. Then there is nothing left to average.
        if self._handles or (self._should_synchronize and not self._synchronized):
            self.synchronize()
        self._synchronized = False
        loss = wait()
        tell(steps.applying)
        return loss

    if closure is None:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "step() after synchronize() averages once more; step in optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        tell(steps.applying)
    result = super(self.__class__, self).step(None if closure is None else averaged)
    if heartbeat.watched():
        heartbeat.stepped()
    tell(steps.ended)
    return result


def _synchronize(self: Any) -> None:
    if hasattr(self, "virtual_gradients"):
        # The gradients are averages already. A script that clips them calls this, to no effect.
        self.virtual_gradients.require_finished()
        return
    steps = steps_of(self)
    if hasattr(self, "_later_hooks"):  # first, as the guard ignores parameters that are not enlisted
        self._requires_update.clear()
        for each in parameters_of(self):
            if each.requires_grad:
                _enlist(self, each)
    tell(steps.averaging)
    _horovods_synchronize(self)
    for each in parameters_of(self):  # fused optimizers need gradients in their parameters' memory format
        if each.is_contiguous() or (grad := each.grad) is None or grad.is_sparse:
            continue
        if grad.stride() != each.stride():
            each.grad = torch.empty_like(each).copy_(grad)
    tell(steps.averaged)


def _reporting(send: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return Horovod's method that sends a gradient, or a group of them, with a report before."""

    def report(self: Any, sent: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        for listener in steps_of(self).sending:
            for each in (sent,) if isinstance(sent, torch.Tensor) else sent:
                listener(each)
        return send(self, sent)

    return report


def _average_loss(optimizer: Any, loss: Any) -> Callable[[], Any]:
    """Begin to average the losses that closures return."""
    # By the loss, LBFGS decides how often to evaluate a closure. With the average, all ranks decide alike.
    if hvd.size() == 1 or not optimizer.process_set.included():
        return lambda: loss
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
    is_number = is_tensor or isinstance(loss, int | float)
    value = loss.detach() if is_tensor else loss
    # A rank whose closure returns None sends a zero, so that no rank waits for it.
    mean = torch.tensor(float(value) if is_number else 0.0, dtype=torch.float64)
    handle = hvd.allreduce_async_(
        mean,
        name=f"hvdrecover.closure.{next(iter(optimizer._parameter_names.values()), '')}",
        op=hvd.Sum if optimizer.op == hvd.Sum else hvd.Average,
        process_set=optimizer.process_set,
    )

    def wait() -> Any:
        hvd.synchronize(handle)
        if is_tensor:
            return torch.full_like(loss.detach(), mean.item())
        return mean.item() if is_number else loss

    return wait


def _adasum_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    refuse_late(self, self._requires_update, "DistributedOptimizer(op=hvd.Adasum)", "optimizer was wrapped")
    return _adasums_step(self, closure)


def refuse_late(optimizer: Any, known: Collection[torch.Tensor], setting: str, moment: str) -> None:
    """Refuse parameters that came after a moment, because their gradients would not be averaged."""
    for each in parameters_of(optimizer):
        if each.requires_grad and each not in known:
            raise ConfigError(
                setting,
                f"a parameter of shape {tuple(each.shape)} was added, or has begun to require gradients, "
                f"after the {moment}: its gradients would not be averaged. Let all parameters require "
                "gradients before, and freeze them afterwards",
            )


def name_parameters(components: Mapping[str, Any]) -> None:
    """Let Horovod average gradients by names that all ranks have in common."""
    known = {id(each): name for name, each in by_name(components).items()}
    for component in components.values():
        names = getattr(component, "_parameter_names", None)
        if not isinstance(component, torch.optim.Optimizer) or not isinstance(names, dict):
            continue
        # Without ``named_parameters``, Horovod's names are places in the groups: ranks with groups in other
        # orders would average gradients of different parameters. With them, ``torch.compile`` puts a prefix
        # before names, and ranks that do not compile would wait for other names.
        found = {
            each: known.get(id(each), name) if name.startswith(_NO_NAME) else plain(name)
            for each, name in names.items()
        }
        if len(set(found.values())) == len(found):
            names.update(found)


# -- parameters that come later ----------------------------------------------------------------------------


def _register_hooks(self: Any) -> None:
    _horovods_register(self)
    self._later_hooks = {}
    for each in parameters_of(self):
        if each not in self._requires_update:
            _hook(self, each)


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    super(self.__class__, self).add_param_group(param_group)
    if not hasattr(self, "_should_synchronize"):  # called by the constructor
        return
    number = len(self.param_groups) - 1
    for place, each in enumerate(self.param_groups[-1]["params"]):
        self._parameter_names.setdefault(each, f"{_NO_NAME}{number}.{place}")
        self._allreduce_delay.setdefault(each, self.backward_passes_per_step)
        if hasattr(self, "_later_hooks"):
            _hook(self, each)


def _hook(self: Any, parameter: torch.Tensor) -> None:
    """Average a parameter's gradients whenever it has any, also if it is still frozen now."""
    if parameter in self._later_hooks or not (parameter.is_floating_point() or parameter.is_complex()):
        return
    send = self._make_hook(parameter)

    def arrived(*_: Any) -> None:
        _enlist(self, parameter)
        send()

    frozen = not parameter.requires_grad
    with torch.enable_grad():
        accumulator = parameter.requires_grad_().expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    parameter.requires_grad_(not frozen)
    self._later_hooks[parameter] = accumulator.register_hook(arrived)  # type: ignore[union-attr]
    self._grad_accs.append(accumulator)  # else the node and its hook would be deleted


def _enlist(self: Any, parameter: torch.Tensor) -> None:
    self._requires_update.add(parameter)
    if self._groups is not None and parameter not in self._p_to_group:
        self._p_to_group[parameter] = (parameter,)
        self._group_counts[parameter,] = 0


def _forget_parameter(self: Any, parameter: torch.Tensor) -> None:
    """Remove the hook of a parameter whose group was added after the commit, and is removed by a rollback."""
    handle = getattr(self, "_later_hooks", {}).pop(parameter, None)
    if handle is not None:
        handle.remove()
    self._requires_update.discard(parameter)
    self._group_counts.pop(self._p_to_group.pop(parameter, None), None)


def forget_passes(component: Any) -> None:
    """Let an optimizer count the backward passes of a step from 0 again, as when it loads a commit."""
    needed = getattr(component, "backward_passes_per_step", 1)
    left = getattr(component, "_allreduce_delay", {}).values()  # other libraries' optimizers lack it
    if min(left, default=needed) < needed and not hasattr(component, "virtual_gradients"):
        component._handles.clear()
        component.set_backward_passes_per_step(component.backward_passes_per_step)
        component.zero_grad()


# -- zero_grad and compression -----------------------------------------------------------------------------


def _zero_grad(horovods: Callable[[Any], None]) -> Callable[..., None]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._handles:
            return horovods(self)  # raises
        super(self.__class__, self).zero_grad(*args, **kwargs)

    return zero_grad


def _widen(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
    """Horovod has no bfloat16."""
    return (tensor.float(), tensor.dtype) if tensor.dtype is torch.bfloat16 else (tensor, None)


def _narrow(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _contiguous(compress: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Horovod refuses tensors of other memory formats, such as ``channels_last``."""

    def contiguous(tensor: torch.Tensor) -> Any:
        sent, context = compress(tensor)
        return (sent if sent.is_sparse else sent.contiguous()), context

    return contiguous
