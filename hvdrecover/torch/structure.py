"""The structure of modules and optimizers, which ranks that train together must have in common."""

from __future__ import annotations

from typing import Any

import torch

from hvdrecover.elastic.interfaces import Entry


def of_module(module: torch.nn.Module) -> list[Entry]:
    """Names, shapes and dtypes of its parameters and buffers, and which are trained."""
    entries = [
        Entry(f".{name}", f"{_kind(each)}, {'trained' if each.requires_grad else 'frozen'}")
        for name, each in module.named_parameters(remove_duplicate=False)
    ]
    return entries + [Entry(f".{name}", f"{_kind(each)}, a buffer") for name, each in module.named_buffers()]


def of_optimizer(optimizer: torch.optim.Optimizer) -> list[Entry]:
    """Its kind, how many parameters each group has, and its hyper-parameters."""
    # Horovod's wrapper has the name of the class that it wraps.
    entries = [Entry("", f"a {type(optimizer).__name__}")]
    for number, group in enumerate(optimizer.param_groups):
        entries.append(Entry(f".param_groups.{number}", f"{len(group['params'])} parameters"))
        entries += [
            Entry(f".param_groups.{number}.{name}", _value(value), setting=True, stored=True)
            for name, value in sorted(group.items())
            if name != "params"
        ]
    return entries


def of_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler) -> list[Entry]:
    """Its kind, and its settings."""
    return [
        Entry("", f"a {type(scheduler).__name__}"),
        *(
            Entry(f".{name}", _value(value), setting=True, stored=True)
            for name, value in sorted(scheduler.state_dict().items())
            if not name.startswith("_") and name != "last_epoch"
        ),
    ]


def _kind(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "not yet known"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _value(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
