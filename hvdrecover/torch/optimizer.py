"""Putting a stored state into a torch optimizer, exactly."""

from __future__ import annotations

from typing import Any

import torch

from hvdrecover.elastic.interfaces import Tree

# State that common optimizers keep in the shape of its parameter.
_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta"}


def fit(name: str, optimizer: torch.optim.Optimizer, tree: Tree) -> tuple[Tree, list[str]]:
    """The part of a stored state that fits an optimizer, and a line for each difference.

    If the groups of parameters differ, nothing fits: state is kept by a parameter's number.
    """
    stored = [len(group["params"]) for group in tree["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if stored != present:
        line = f"{name}: groups of {stored} parameters in the commit, of {present} in the optimizer"
        return optimizer.state_dict(), [line]
    differences, fitting = [], {}
    parameters = _parameters(optimizer)
    for index, entries in tree["state"].items():
        found = _misfits(f"{name}.state.{index}", parameters[index], entries)
        differences += found
        if not found:
            fitting[index] = entries
    return {**tree, "state": fitting}, differences


def load(optimizer: torch.optim.Optimizer, tree: Tree) -> None:
    """Put a stored state that fits into an optimizer, in the dtypes that it was stored in.

    ``load_state_dict`` casts to the parameter's dtype, which would spoil, say, float32 moments of bfloat16
    parameters. It is still what must be called: Horovod's wrapper forgets unfinished allreduces in it.
    """
    optimizer.load_state_dict(tree)
    parameters = _parameters(optimizer)
    for index, entries in tree["state"].items():
        present = optimizer.state[parameters[index]]
        for key, stored in entries.items():
            if isinstance(stored, torch.Tensor) and present[key].dtype != stored.dtype:
                present[key] = stored.to(present[key].device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _misfits(path: str, parameter: torch.Tensor, entries: dict[str, Any]) -> list[str]:
    return [
        f"{path}.{key}: {list(stored.shape)} in the commit, {list(parameter.shape)} for its parameter"
        for key, stored in entries.items()
        if key in _SHAPED and isinstance(stored, torch.Tensor) and stored.shape != parameter.shape
    ]
