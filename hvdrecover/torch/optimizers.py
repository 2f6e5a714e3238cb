"""The state of torch optimizers in commits: parameters are keyed by their names in the models, if any.

1. `tree` puts names in the place of the numbers that ``state_dict`` gives to parameters. Parameters that are
   in no module of the state keep their numbers, as all parameters have in the commits of earlier releases.
2. `fit` compares the commit's parameter groups with the optimizer's, by the names of parameters.
3. `load` puts this optimizer's numbers in the place of names, and calls torch's ``load_state_dict``.

Schedulers, scripts and Horovod's wrapper hold the optimizer's dicts and lists, too. `load` keeps the objects.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch

from hvdrecover.state.adapter import Tree
from hvdrecover.torch.copying import can_take, own

logger = logging.getLogger("hvdrecover")

Named = Mapping[str, torch.Tensor]
"""The parameters of all modules of a state, by name."""
_Group = dict[str, Any]


def tree(optimizer: torch.optim.Optimizer, named: Named) -> Tree:
    """Return the optimizer's ``state_dict``, with names for numbers, and the names of frozen parameters."""
    state, keys = optimizer.state_dict(), _keys(optimizer, named)
    if not _is_numbered(state, keys):
        return state
    frozen = [key for key, each in zip(keys, parameters_of(optimizer), strict=True) if not each.requires_grad]
    return {
        **_relabelled(state, dict(enumerate(keys))),
        "frozen": [key for key in frozen if isinstance(key, str)],
    }


def fit(name: str, optimizer: torch.optim.Optimizer, tree: Tree, named: Named) -> tuple[Tree, list[str]]:
    """Return a stored state if it fits an optimizer; else the present one, and a line for each difference."""
    if "param_groups" not in tree or "state" not in tree:
        # The class defines the format of its state_dict and must check it; else the tree does not fit.
        if "param_groups" not in optimizer.state_dict():
            return tree, []
        line = f"{name}: a dict in the commit, a {type(optimizer).__name__} in this state"
        return optimizer.state_dict(), [line]
    _, differences = _numbers(name, optimizer, tree, named)
    if not differences:
        differences = list(_other_kind(name, optimizer, tree))
    if differences:
        return optimizer.state_dict(), differences
    # An option that the commit does not know, because this torch is newer or a scheduler was added, stays.
    options = [
        {**{key: value for key, value in present.items() if key != "params"}, **stored}
        for stored, present in zip(tree["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**tree, "param_groups": options}, []


def load(optimizer: torch.optim.Optimizer, tree: Tree, named: Named, *, keep: bool) -> None:
    """Put a stored state that fits into an optimizer, in the dtypes that it was stored in.

    ``load_state_dict`` casts to the parameter's dtype, which would spoil, say, float32 moments of bfloat16
    parameters. It is still what must be called: Horovod's wrapper forgets unfinished allreduces in it.

    Unless the optimizer may ``keep`` them, tensors are copied, and into those that it has where they fit:
    memory that is new to the process costs several times as much as the copy.

    Gradients are forgotten: leftovers of an interrupted backward pass would be added to the next pass's.
    """
    if "param_groups" in tree and _is_numbered(optimizer.state_dict(), _keys(optimizer, named)):
        tree = _numbered(optimizer, tree, named)
    if not keep:
        tree = own(tree, optimizer.state_dict())
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(tree)
    parameters = list(parameters_of(optimizer))
    for key, entries in tree.get("state", {}).items():
        # State that belongs to no parameter has another key.
        own_key = isinstance(key, int) and 0 <= key < len(parameters)
        present = optimizer.state.get(parameters[key]) if own_key else None
        if isinstance(present, dict) and isinstance(entries, dict):
            present.update(
                {name: _as_stored(entries[name], present[name]) for name in entries.keys() & present.keys()}
            )
    _keep_objects(optimizer, groups, state)
    for parameter in parameters:
        parameter.grad = None
    # Horovod's wrapper counts the gradients of each group, and its load_state_dict does not reset the counts.
    counts = getattr(optimizer, "_group_counts", {})
    counts.update(dict.fromkeys(counts, 0))


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


def _keep_objects(optimizer: torch.optim.Optimizer, groups: list[_Group], state: Any) -> None:
    """Put the loaded values into the optimizer's previous dicts and lists, which schedulers also hold."""
    if optimizer.param_groups is not groups:
        for old, new in zip(groups, optimizer.param_groups, strict=True):
            _replace(old, new)
    if optimizer.state is not state:
        for key, entries in optimizer.state.items():
            old = state.get(key)
            if isinstance(old, dict) and isinstance(entries, dict):
                _replace(old, entries)
            else:
                state[key] = entries
        for key in state.keys() - optimizer.state.keys():
            del state[key]
    vars(optimizer).update(param_groups=groups, state=state)  # as torch's own __setstate__ does


def _replace(old: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Give a dict the content of another; its tensors stay the same objects where they fit."""
    for key in old.keys() - new.keys():
        del old[key]
    for key, value in new.items():
        present: Any = old.get(key)
        if isinstance(value, torch.Tensor) and present is not value and can_take(present, value):
            present.copy_(value)
        else:
            old[key] = value


# -- parameters by name ------------------------------------------------------------------------------------


def _keys(optimizer: torch.optim.Optimizer, named: Named) -> list[int | str]:
    """Return each parameter's name, or its number if it has no name."""
    names: dict[int, str] = {}
    for name, each in named.items():
        names.setdefault(id(each), name)
    return [names.get(id(each), number) for number, each in enumerate(parameters_of(optimizer))]


def _is_numbered(state: Any, keys: Sequence[int | str]) -> bool:
    """Return whether a ``state_dict`` numbers the parameters as torch does."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return False
    return [key for group in state["param_groups"] for key in group["params"]] == list(range(len(keys)))


def _relabelled(tree: Tree, labels: Mapping[Any, int | str]) -> Tree:
    groups = [
        {**group, "params": [labels.get(key, key) for key in group["params"]]}
        for group in tree["param_groups"]
    ]
    state = {labels.get(key, key): entries for key, entries in tree["state"].items()}
    return {**tree, "state": state, "param_groups": groups}


def _numbers(
    name: str, optimizer: torch.optim.Optimizer, tree: Tree, named: Named
) -> tuple[dict[Any, int], list[str]]:
    """Return the optimizer's number of each parameter of a commit, and a line for each difference.

    Parameters are matched by their names. If the commit or the optimizer knows no names, they are matched by
    their places.
    """
    keys = iter(_keys(optimizer, named))
    present = [[next(keys) for _ in group["params"]] for group in optimizer.param_groups]
    stored = [group["params"] for group in tree["param_groups"]]
    sizes = [[len(group) for group in groups] for groups in (stored, present)]
    line = f"{name}: groups of {sizes[0]} parameters in the commit, of {sizes[1]} in the optimizer"
    lines = [line] if sizes[0] != sizes[1] else []
    if not all(any(isinstance(key, str) for key in chain(*groups)) for groups in (present, stored)):
        return {key: number for number, key in enumerate(chain(*stored))}, lines
    for number, (theirs, mine) in enumerate(zip_longest(stored, present, fillvalue=())):
        where = dict.fromkeys(set(theirs) - set(mine), "in the commit, but not in the optimizer")
        where |= dict.fromkeys(set(mine) - set(theirs), "in the optimizer, but not in the commit")
        lines += sorted(f"{name}.param_groups.{number}: {key} is {where[key]}" for key in where)
    return {key: number for number, key in enumerate(chain(*present))}, lines


def _numbered(optimizer: torch.optim.Optimizer, tree: Tree, named: Named) -> Tree:
    """Return a tree that fits, with this optimizer's numbers. Freeze parameters as in the commit."""
    numbers, differences = _numbers("", optimizer, tree, named)
    assert not differences, differences
    if "frozen" in tree:
        names = set(tree["frozen"])
        for key, parameter in zip(_keys(optimizer, named), parameters_of(optimizer), strict=True):
            frozen = key in names
            if isinstance(key, str) and parameter.requires_grad == frozen:
                parameter.requires_grad_(not frozen)
                logger.info("%s is %s, as in the commit", key, "frozen" if frozen else "trained")
    found = _relabelled({key: value for key, value in tree.items() if key != "frozen"}, numbers)
    for group in found["param_groups"]:
        group["params"].sort()  # torch matches parameters by their order in the group
    return found


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


# -- names of parameters -------------------------------------------------------------------------------------

_WRAPPERS = {"_orig_mod", "module"}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def plain(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` and ``DataParallel`` add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def renamed(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a commit under the names that a module has for them, however it is wrapped."""
    known = {plain(name): name for name in mine}
    found = {name if name in mine else known.get(plain(name), name): each for name, each in stored.items()}
    return found if len(found) == len(stored) else dict(stored)


def by_name(components: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters of all modules, as ``model.0.weight``, whatever wraps the modules."""
    found: dict[str, torch.Tensor] = {}
    for name, component in components.items():
        if isinstance(component, torch.nn.Module):
            inner = dict(component.named_parameters())
            short = {plain(key): each for key, each in inner.items()}
            inner = short if len(short) == len(inner) else inner
            found |= {f"{name}.{key}": each for key, each in inner.items()}
    return found
