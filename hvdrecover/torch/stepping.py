"""The steps of optimizers: reports of them, and additions to Horovod's ``DistributedOptimizer``.

A step of a ``DistributedOptimizer``, and when the lists of its `Steps` are called:

1. ``begins``.
2. ``averaging``, Horovod's averages of all gradients, ``averaged``. The script may do this before the step,
   by ``synchronize``.
3. ``applying``: the optimizer that is wrapped is about to apply the gradients. A listener may take them away.
4. ``ended``.

Other optimizers report 1, 3 and 4. Adasum has no averages: it steps for each parameter by itself, in backward
passes, and reports each of these steps.

To wrap an optimizer, Horovod makes a new class from the attributes that its own classes have at that time. So
an optimizer that is wrapped after `hvdrecover.torch` was imported reports its steps, and has these additions:

- ``step(closure)`` is refused. Horovod's averages gradients and then calls the closure, whose gradients each
  rank would apply as they are.
- Parameters that begin to require gradients after the optimizer was wrapped are refused: Horovod would not
  average them. Frozen ones are no longer given zeros as gradients, by which weight decay and momentum would
  move them.
- ``zero_grad`` takes the arguments of the optimizer that is wrapped.
- Gradients of bfloat16, and of other memory formats, are sent as what Horovod can send.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from horovod.torch.compression import FP16Compressor, NoneCompressor
from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError
from hvdrecover.torch.optimizers import parameters_of

_horovods_synchronize = _DistributedOptimizer.synchronize
_horovods_send = _DistributedOptimizer._allreduce_grad_async
_horovods_send_group = _DistributedOptimizer._grouped_allreduce_grad_async
_horovods_register = _DistributedOptimizer._register_hooks
_adasums_step = _DistributedAdasumOptimizer.step


def extend() -> None:
    """Replace methods of Horovod's classes."""
    _DistributedOptimizer.step = _step
    _DistributedOptimizer.synchronize = _synchronize
    _DistributedOptimizer._allreduce_grad_async = _send
    _DistributedOptimizer._grouped_allreduce_grad_async = _send_group
    _DistributedOptimizer._register_hooks = _register_hooks
    _DistributedOptimizer.reports_steps = True
    _DistributedAdasumOptimizer.step = _adasum_step
    for kind in (_DistributedOptimizer, _DistributedAdasumOptimizer):
        kind.zero_grad = _zero_grad(kind.zero_grad)
    NoneCompressor.compress, NoneCompressor.decompress = staticmethod(_widen), staticmethod(_narrow)
    halve = FP16Compressor.compress
    FP16Compressor.compress = staticmethod(lambda tensor: halve(tensor.contiguous()))
    if heartbeat.watched():
        register_optimizer_step_post_hook(_beat)


# -- reports -----------------------------------------------------------------------------------------------


Listener = Callable[[], object]


@dataclass
class Steps:
    """The listeners to the steps of one optimizer, in the order in which they are called."""

    begins: list[Listener] = field(default_factory=list)
    # Given each parameter whose gradient of this rank is about to be sent, or added up.
    sending: list[Callable[[torch.Tensor], object]] = field(default_factory=list)
    averaging: list[Listener] = field(default_factory=list)
    averaged: list[Listener] = field(default_factory=list)
    applying: list[Listener] = field(default_factory=list)
    ended: list[Listener] = field(default_factory=list)


def steps_of(optimizer: Any) -> Steps:
    """Return the listeners of an optimizer. Copies of the optimizer have none."""
    steps: Steps | None = vars(optimizer).get("_hvdrecover_steps")
    if steps is None:
        if averages(optimizer) and not hasattr(optimizer, "reports_steps"):
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


def tell(*listeners: list[Listener]) -> None:
    for each in listeners:
        for listener in each:
            listener()


def _beat(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if not hasattr(optimizer, "reports_steps"):
        heartbeat.stepped()


# -- steps -------------------------------------------------------------------------------------------------


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    if closure is not None:
        raise ConfigError(
            "optimizer.step(closure)",
            "Horovod averages gradients before the step, so a closure cannot compute them again. Call "
            "backward(), and then step() without a closure",
        )
    steps, virtual = steps_of(self), getattr(self, "virtual_gradients", None)
    if virtual is not None:
        virtual.require_finished()
    tell(steps.begins)
    if self._should_synchronize and virtual is None:
        self.synchronize()
    self._synchronized = False
    tell(steps.applying)
    result = super(self.__class__, self).step()
    if heartbeat.watched():
        heartbeat.stepped()
    tell(steps.ended)
    return result


def _synchronize(self: Any) -> None:
    if hasattr(self, "virtual_gradients"):
        # The gradients are averages already. A script that clips them calls this, to no effect.
        self.virtual_gradients.require_finished()
        self._synchronized = True
        return
    steps, hooked = steps_of(self), getattr(self, "hooked", None)
    tell(steps.averaging)
    if hooked is not None:
        refuse_late_parameters(self, hooked)
        self._requires_update = {each for each in hooked if each.requires_grad}
    _horovods_synchronize(self)
    for each in parameters_of(self):  # fused optimizers need gradients in their parameters' memory format
        if each.is_contiguous() or (grad := each.grad) is None or grad.is_sparse:
            continue
        if grad.stride() != each.stride():
            each.grad = torch.empty_like(each).copy_(grad)
    tell(steps.averaged)


def _register_hooks(self: Any) -> None:
    _horovods_register(self)
    self.hooked = frozenset(self._requires_update)


def refuse_late_parameters(optimizer: Any, known: Container[torch.Tensor]) -> None:
    """Refuse parameters that require gradients and are not known."""
    for each in parameters_of(optimizer):
        if each.requires_grad and each not in known:
            raise ConfigError(
                "DistributedOptimizer",
                f"a parameter of shape {tuple(each.shape)} was added, or has begun to require gradients, "
                "after the optimizer was wrapped or the state was made, so its gradients would not be "
                "averaged. Let all parameters require gradients until then, and freeze them afterwards",
            )


def _send(self: Any, parameter: torch.Tensor) -> Any:
    for listener in steps_of(self).sending:
        listener(parameter)
    return _horovods_send(self, parameter)


def _send_group(self: Any, parameters: tuple[torch.Tensor, ...]) -> Any:
    for listener in steps_of(self).sending:
        for each in parameters:
            listener(each)
    return _horovods_send_group(self, parameters)


def _adasum_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    refuse_late_parameters(self, self._requires_update)
    return _adasums_step(self, closure)


# -- backward passes of one step -----------------------------------------------------------------------------


def passes(component: Any) -> tuple[int, int]:
    """Return how many backward passes have ended since the last step, and how many a step needs."""
    of = getattr(component, "backward_passes_per_step", 1)
    delays = getattr(component, "_allreduce_delay", None)  # other libraries' optimizers lack it
    if of == 1 or delays is None or hasattr(component, "virtual_gradients"):
        return 0, 1
    return of - min(delays.values(), default=of), of


def forget_passes(component: Any) -> None:
    """Let an optimizer count backward passes from 0 again, as it does when it loads a commit."""
    if passes(component)[0]:
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


def _widen(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """Horovod has no bfloat16, and refuses other memory formats, such as ``channels_last``."""
    sent = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    return sent.contiguous(), tensor.dtype


def _narrow(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)
