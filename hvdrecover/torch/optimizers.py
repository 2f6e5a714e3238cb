"""Putting a stored state into a torch optimizer, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hvdrecover.elastic.interfaces import Tree
from hvdrecover.torch.copying import own
from hvdrecover.torch.names import parameters_of

# State that torch's optimizers keep in the shape of its parameter.
_SHAPED = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "sum",
    "acc_delta",
}


def fit(name: str, optimizer: torch.optim.Optimizer, tree: Tree) -> tuple[Tree, list[str]]:
    """The part of a stored state that fits an optimizer, and a line for each difference.

    If the groups of parameters differ, nothing fits: state is kept by a parameter's number.
    """
    if "param_groups" not in tree or "state" not in tree:
        # One with a state_dict of its own making, which only it can judge; else not an optimizer's at all.
        if "param_groups" not in optimizer.state_dict():
            return tree, []
        line = f"{name}: a dict in the commit, a {type(optimizer).__name__} in this state"
        return optimizer.state_dict(), [line]
    differences = _other_groups(name, optimizer, tree)
    if differences:
        return optimizer.state_dict(), differences
    fitting = {}
    parameters = list(parameters_of(optimizer))
    for key, entries in tree["state"].items():
        found = _misfits(f"{name}.state.{key}", optimizer, _parameter(parameters, key), entries)
        differences += found
        if not found:
            fitting[key] = entries
    # An option that the commit does not know, because this torch is newer or a scheduler was added, stays.
    groups = [
        {**_options(present), **stored}
        for stored, present in zip(tree["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**tree, "state": fitting, "param_groups": groups}, differences


def load(optimizer: torch.optim.Optimizer, tree: Tree, *, keep: bool) -> None:
    """Put a stored state that fits into an optimizer, in the dtypes that it was stored in.

    ``load_state_dict`` casts to the parameter's dtype, which would spoil, say, float32 moments of bfloat16
    parameters. It is still what must be called: Horovod's wrapper forgets unfinished allreduces in it.

    Unless the optimizer may ``keep`` them, tensors are copied, and into those that it has where they fit:
    memory that is new to the process costs several times as much as the copy.

    Gradients are forgotten: what an interrupted backward pass has left would be added to those of the next.
    """
    if not keep:
        tree = own(tree, optimizer.state_dict())
    optimizer.load_state_dict(tree)
    parameters = list(parameters_of(optimizer))
    for key, entries in tree.get("state", {}).items():
        parameter = _parameter(parameters, key)
        present = optimizer.state.get(parameter) if parameter is not None else None
        if isinstance(present, dict) and isinstance(entries, dict):
            present.update(
                {name: _as_stored(entries[name], present[name]) for name in entries.keys() & present.keys()}
            )
    for parameter in parameters:
        parameter.grad = None
    _forget_unfinished_groups(optimizer)


def _forget_unfinished_groups(optimizer: torch.optim.Optimizer) -> None:
    # Horovod's wrapper counts the gradients of each group, and its load_state_dict does not begin anew.
    counts = getattr(optimizer, "_group_counts", {})
    for group in counts:
        counts[group] = 0


def _as_stored(stored: Any, present: Any) -> Any:
    """Return what loading has made of a value, with the stored dtype and without what else loading spoils."""
    if isinstance(stored, torch.Tensor):
        recast = isinstance(present, torch.Tensor) and present.dtype != stored.dtype
        return stored.to(present.device) if recast else present
    if isinstance(stored, dict) and isinstance(present, dict) and stored.keys() == present.keys():
        return {key: _as_stored(stored[key], present[key]) for key in present}
    if type(stored) is type(present) is list and len(stored) == len(present):
        return [_as_stored(*pair) for pair in zip(stored, present, strict=True)]
    # torch makes its way through anything iterable, and spoils strings and named tuples by that.
    return stored if isinstance(stored, str | bytes) else present


def _parameter(parameters: list[torch.Tensor], key: Any) -> torch.Tensor | None:
    """The parameter of a state's key; None for state that belongs to no parameter."""
    return parameters[key] if isinstance(key, int) and 0 <= key < len(parameters) else None


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _other_groups(name: str, optimizer: torch.optim.Optimizer, tree: Tree) -> list[str]:
    stored = [len(group["params"]) for group in tree["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if stored != present:
        return [f"{name}: groups of {stored} parameters in the commit, of {present} in the optimizer"]
    return list(_other_kind(name, optimizer, tree))


def _other_kind(name: str, optimizer: torch.optim.Optimizer, tree: Tree) -> Iterator[str]:
    """A line for each group of another kind of optimizer: each has options that the other lacks."""
    for number, (stored, present) in enumerate(
        zip(tree["param_groups"], optimizer.param_groups, strict=True)
    ):
        missing = sorted(map(str, optimizer.defaults.keys() - stored.keys()))
        unknown = sorted(map(str, stored.keys() - present.keys()))
        if missing and unknown:
            yield (
                f"{name}.param_groups.{number}: the options {', '.join(unknown)} in the commit, "
                f"{', '.join(missing)} in the optimizer, which is of another kind"
            )


def _misfits(
    path: str, optimizer: torch.optim.Optimizer, parameter: torch.Tensor | None, entries: dict[str, Any]
) -> list[str]:
    # Optimizers from elsewhere may well keep, say, projected moments under these names.
    if parameter is None or not isinstance(entries, dict) or not _is_of_torch(optimizer):
        return []
    return [
        f"{path}.{key}: {list(stored.shape)} in the commit, {list(parameter.shape)} for its parameter"
        for key, stored in entries.items()
        if key in _SHAPED and isinstance(stored, torch.Tensor) and stored.shape != parameter.shape
    ]


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    # Horovod's wrapper is a class of its own, derived from the one that it wraps.
    modules = [kind.__module__ for kind in type(optimizer).__mro__ if issubclass(kind, torch.optim.Optimizer)]
    return any(module.startswith("torch.optim.") and module != "torch.optim.optimizer" for module in modules)
