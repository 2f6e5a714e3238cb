"""The state of torch optimizers in commits: parameters are keyed by their names in the models, if any.

1. `tree` puts names in the place of the numbers that ``state_dict`` gives to parameters. Parameters that are
   in no module of the state keep their numbers, as all parameters have in the commits of earlier releases.
2. `fit` finds the optimizer's group for each group of the commit by the parameters in it.
3. `load` adds groups that the optimizer lacks, removes groups that were added after the commit, and brings
   all into the commit's order. Then a number means the same parameter on both sides, and `load` calls
   torch's ``load_state_dict``.

Schedulers, scripts and Horovod's wrapper hold the optimizer's dicts and lists, too. `load` keeps the objects.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from hvdrecover.checkpoint.arena import HUGE_PAGE, allocate
from hvdrecover.state.adapter import Tree

logger = logging.getLogger("hvdrecover")

Named = Mapping[str, torch.Tensor]
"""The parameters of all modules of a state, by name."""
Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Copies tensors into others of the same dtypes and shapes."""
_Group = dict[str, Any]

# The groups that an optimizer had when a state was made of it. A rollback may remove others.
_first_groups: WeakKeyDictionary[torch.optim.Optimizer, list[_Group]] = WeakKeyDictionary()


def tree(optimizer: torch.optim.Optimizer, named: Named) -> Tree:
    """Return the optimizer's ``state_dict``, with names for numbers, and the names of frozen parameters."""
    _first_groups.setdefault(optimizer, list(optimizer.param_groups))
    state, keys = optimizer.state_dict(), _keys(optimizer, named)
    if not _is_numbered(state, keys):
        return state
    parameters = zip(keys, parameters_of(optimizer), strict=True)
    frozen = [key for key, each in parameters if isinstance(key, str) and not each.requires_grad]
    return {**_relabelled(state, dict(enumerate(keys))), "frozen": frozen}


def fit(name: str, optimizer: torch.optim.Optimizer, tree: Tree, named: Named) -> tuple[Tree, list[str]]:
    """Return the part of a stored state that fits an optimizer, and a line for each difference."""
    if "param_groups" not in tree or "state" not in tree:
        # The class defines the format of its state_dict and must check it; else the tree does not fit.
        if "param_groups" not in optimizer.state_dict():
            return tree, []
        line = f"{name}: a dict in the commit, a {type(optimizer).__name__} in this state"
        return optimizer.state_dict(), [line]
    _first_groups.setdefault(optimizer, list(optimizer.param_groups))
    match = _matched(name, optimizer, tree, named)
    differences = [*match.differences] or list(_other_kind(name, optimizer, tree, match.groups))
    if differences:
        return optimizer.state_dict(), differences
    # An option that the commit does not know, because this torch is newer or a scheduler was added, stays.
    options = [
        {**_options(present or {}), **stored}
        for stored, present in zip(tree["param_groups"], match.groups, strict=True)
    ]
    return {**tree, "param_groups": options}, []


def load(optimizer: torch.optim.Optimizer, tree: Tree, named: Named, copy_all: Copy | None) -> None:
    """Put a stored state that fits into an optimizer, in the dtypes that it was stored in."""
    if "param_groups" in tree and _is_numbered(optimizer.state_dict(), _keys(optimizer, named)):
        tree = _aligned(optimizer, tree, named)
    # Copy into present tensors: memory that is new to the process costs several times as much as the copy.
    # Without ``copy_all``, the optimizer may keep the tree's tensors.
    if copy_all is not None:
        tree = _own(tree, optimizer.state_dict(), copy_all)
    groups, state = optimizer.param_groups, optimizer.state
    # Horovod's wrapper forgets unfinished allreduces in this call. The call casts to the parameter's dtype,
    # which would spoil, say, float32 moments of bfloat16 parameters; the stored dtypes are restored below.
    optimizer.load_state_dict(tree)
    parameters = list(parameters_of(optimizer))
    for key, entries in tree.get("state", {}).items():
        # Some optimizers also have state that belongs to no parameter.
        numbered = isinstance(key, int) and 0 <= key < len(parameters)
        present = optimizer.state.get(parameters[key]) if numbered else None
        if isinstance(present, dict) and isinstance(entries, dict):
            common = entries.keys() & present.keys()
            present.update({name: _as_stored(entries[name], present[name]) for name in common})
    _keep_objects(optimizer, groups, state)
    # Leftovers of an interrupted backward pass would be added to the next pass's.
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
        for key in state.keys() - optimizer.state.keys():
            del state[key]
        for key, entries in optimizer.state.items():
            if isinstance(state.get(key), dict) and isinstance(entries, dict):
                _replace(state[key], entries)
            else:
                state[key] = entries
    vars(optimizer).update(param_groups=groups, state=state)  # as torch's own __setstate__ does


def _replace(old: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Give a dict the content of another; its tensors stay the same objects where they fit."""
    for key in old.keys() - new.keys():
        del old[key]
    for key, value in new.items():
        present: Any = old.get(key)
        if isinstance(value, torch.Tensor) and present is not value and _can_take(present, value):
            present.copy_(value)
        else:
            old[key] = value


def _own(tree: Tree, present: Tree, copy_all: Copy) -> Tree:
    """A copy of a tree. Tensors of the tree ``present`` that fit are overwritten, and become part of it."""
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    taken: set[int] = set()

    def copied(value: Any, old: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not _can_take(old, value) or old.data_ptr() in taken:
                old = _new_like(value)
            taken.add(old.data_ptr())
            sources.append(value)
            targets.append(old)
            return old
        if type(value) is dict:
            old = old if isinstance(old, dict) else {}
            return {key: copied(item, old.get(key)) for key, item in value.items()}
        if type(value) is list:
            old = old if isinstance(old, list) and len(old) == len(value) else [None] * len(value)
            return [copied(item, other) for item, other in zip(value, old, strict=True)]
        return copy.deepcopy(value)

    outcome = copied(tree, present)
    copy_all(sources, targets)
    return outcome


def _new_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same dtype and shape; the content is undefined."""
    if tensor.nbytes < HUGE_PAGE or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return torch.empty_like(tensor)
    # torch would take small pages, and spend several times as long on getting them as on filling them.
    memory = allocate(tensor.nbytes, in_children=True)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _can_take(target: Any, value: torch.Tensor) -> bool:
    """Return whether a value can be copied into a tensor without changing its bits or other elements."""
    return (
        type(target) is torch.Tensor
        and (target.dtype, target.shape) == (value.dtype, value.shape)
        and target.is_contiguous()
        and not target.requires_grad
        and not target.is_inference()
    )


# -- parameters by name ------------------------------------------------------------------------------------


def _keys(optimizer: torch.optim.Optimizer, named: Named) -> list[int | str]:
    """Return each parameter's name, the first if it has several, or its number if it has none."""
    names = {id(each): name for name, each in reversed([*named.items()])}
    return [names.get(id(each), number) for number, each in enumerate(parameters_of(optimizer))]


def _is_numbered(state: Any, keys: Sequence[int | str]) -> bool:
    """Return whether a ``state_dict`` numbers the parameters as torch does."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return False
    return _stored_keys(state) == list(range(len(keys)))


def _stored_keys(tree: Tree) -> list[int | str]:
    return [key for group in tree["param_groups"] for key in group["params"]]


def _relabelled(tree: Tree, labels: Mapping[Any, int | str]) -> Tree:
    """Return a tree with other keys for parameters."""
    groups = [
        {**group, "params": [labels.get(key, key) for key in group["params"]]}
        for group in tree["param_groups"]
    ]
    state = {labels.get(key, key): entries for key, entries in tree["state"].items()}
    return {**tree, "state": state, "param_groups": groups}


class _Match(NamedTuple):
    """The parts of an optimizer that match a commit: by the names of parameters, or else by place."""

    groups: Sequence[_Group | None] = ()  # None for a group that the optimizer lacks
    parameters: Mapping[Any, torch.Tensor] = {}  # by the commit's keys
    differences: Sequence[str] = ()


def _matched(name: str, optimizer: torch.optim.Optimizer, tree: Tree, named: Named) -> _Match:
    stored, present = _stored_keys(tree), _keys(optimizer, named)
    if not all(any(isinstance(key, str) for key in keys) for keys in (stored, present)):
        theirs, ours = (
            [len(group["params"]) for group in groups]
            for groups in (tree["param_groups"], optimizer.param_groups)
        )
        if theirs != ours:
            line = f"{name}: groups of {theirs} parameters in the commit, of {ours} in the optimizer"
            return _Match(differences=[line])
        return _Match(optimizer.param_groups, dict(zip(stored, parameters_of(optimizer), strict=True)))
    keys = iter(present)
    mine = [({next(keys) for _ in group["params"]}, group) for group in optimizer.param_groups]
    groups: list[_Group | None] = []
    absent: set[int | str] = set()
    for group in tree["param_groups"]:
        wanted = set(group["params"])
        place = next((place for place, (held, _) in enumerate(mine) if held == wanted), None)
        groups.append(mine.pop(place)[1] if place is not None else None)
        absent |= wanted if place is None else set()
    first = _first_groups[optimizer]
    excess = {key for held, group in mine if any(group is each for each in first) for key in held}
    where = dict.fromkeys(absent & excess, "in other groups of")
    where |= {key: "in the commit, but not in" for key in absent - excess if key not in named}
    where |= dict.fromkeys(excess - absent, "not in the commit, but in")
    if where:
        lines = sorted(f"{name}: parameter {key} is {where[key]} the optimizer" for key in where)
        return _Match(differences=lines)
    held: dict[Any, torch.Tensor] = dict(named)
    held.update(zip(present, parameters_of(optimizer), strict=True))
    return _Match(groups, {key: held[key] for key in stored})


def _aligned(optimizer: torch.optim.Optimizer, tree: Tree, named: Named) -> Tree:
    """Bring the optimizer's groups and parameters into the commit's order; return the tree with numbers."""
    match = _matched("", optimizer, tree, named)
    assert not match.differences, match.differences
    kept = {id(group) for group in match.groups}
    # Groups that were added after the commit; the script will add them again.
    extra = [group for group in optimizer.param_groups if id(group) not in kept]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if id(group) in kept]
    for parameter in [each for group in extra for each in group["params"]]:
        optimizer.state.pop(parameter, None)
        getattr(optimizer, "forget_parameter", lambda parameter: None)(parameter)
    groups = []
    for stored, group in zip(tree["param_groups"], match.groups, strict=True):
        ordered = [match.parameters[key] for key in stored["params"]]
        if group is None:
            optimizer.add_param_group({**copy.deepcopy(_options(stored)), "params": ordered})
        else:
            group["params"][:] = ordered
        groups.append(optimizer.param_groups[-1] if group is None else group)
    optimizer.param_groups[:] = groups
    if "frozen" in tree:
        names = set(tree["frozen"])
        for key, parameter in match.parameters.items():
            frozen = key in names
            if isinstance(key, str) and parameter.requires_grad == frozen:
                parameter.requires_grad_(not frozen)
                logger.info("%s is %s, as in the commit", key, "frozen" if frozen else "trained")
    numbers = {key: number for number, key in enumerate(_stored_keys(tree))}
    return {key: value for key, value in _relabelled(tree, numbers).items() if key != "frozen"}


def _options(group: _Group) -> _Group:
    return {key: value for key, value in group.items() if key != "params"}


def _other_kind(
    name: str, optimizer: torch.optim.Optimizer, tree: Tree, groups: Sequence[_Group | None]
) -> Iterator[str]:
    """A line for each group of another kind of optimizer: each has options that the other lacks."""
    for number, (stored, present) in enumerate(zip(tree["param_groups"], groups, strict=True)):
        missing = sorted(map(str, optimizer.defaults.keys() - stored.keys()))
        unknown = sorted(map(str, stored.keys() - (present or optimizer.param_groups[0]).keys()))
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


def names_of(components: Mapping[str, Any]) -> Callable[[torch.Tensor], str]:
    """Return a function that names parameters: ``model.0.weight``, or ``optimizer's parameter 2``."""
    known: dict[int, str] = {}

    def name_of(parameter: torch.Tensor) -> str:
        if id(parameter) not in known:
            for name, each in components.items():
                if isinstance(each, torch.optim.Optimizer):
                    numbered = enumerate(parameters_of(each))
                    known.update({id(other): f"{name}'s parameter {number}" for number, other in numbered})
            known.update({id(other): name for name, other in by_name(components).items()})
        return known.get(id(parameter), "a parameter without a name")

    return name_of
