"""Trees of tensors and plain values: copied into JSON and arenas at every commit, and rebuilt from them.

A tree becomes JSON in which a tensor is ``{"$tensor": name}``, and its tensors become one safetensors file.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.arena import Arena, Layout, TensorSpec, plan
from hvdrecover.checkpoint.values import Json
from hvdrecover.state.adapter import Framework, Tensor, Tree

TENSOR = "$tensor"


@dataclass(frozen=True)
class Plan:
    """The tensors of a tree without their content; from one commit to the next it rarely changes."""

    names: Sequence[str]
    specs: Sequence[TensorSpec]
    layout: Layout | None
    smallest_first: Sequence[int]


@dataclass(frozen=True)
class Part:
    """One tree, taken apart but not copied: its JSON, its tensors in order, and their plan."""

    structure: Json
    tensors: Sequence[Tensor]
    plan: Plan


class Copier:
    """Copies the same trees at every commit, and remembers the plans in between."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._plans: dict[str, Plan] = {}
        # Names in some plan's order, and views in the same. They must not keep an arena that is let go.
        self._views: weakref.WeakKeyDictionary[Arena, tuple[Sequence[str], list[Tensor]]]
        self._views = weakref.WeakKeyDictionary()

    def take_apart(self, trees: Mapping[str, Tree]) -> dict[str, Part]:
        parts = {}
        for name, tree in trees.items():
            found: dict[str, Tensor] = {}
            structure = flatten(tree, f"state.{name}", self._framework.tensors, found)
            names, tensors = list(found), list(found.values())
            plan = self._plans.get(name)
            if plan is None or plan.names != names or not self._framework.match(tensors, plan.specs):
                plan = self._planned(name, names, tensors)
            parts[name] = Part(structure, tensors, plan)
        self._plans = {name: part.plan for name, part in parts.items()}
        return parts

    def _planned(self, name: str, names: Sequence[str], tensors: Sequence[Tensor]) -> Plan:
        specs = [
            replace(self._framework.spec(tensor, f"state.{name}.{key}"), name=key)
            for key, tensor in zip(names, tensors, strict=True)
        ]
        smallest_first = sorted(range(len(specs)), key=lambda place: specs[place].nbytes)
        return Plan(names, specs, plan(specs) if specs else None, smallest_first)

    def copy(self, parts: Mapping[str, Part], reuse: Mapping[str, Arena]) -> dict[str, Arena]:
        """Copy the tensors of parts into arenas by attribute name; ``reuse`` may be overwritten."""
        arenas = {}
        tensors: list[Tensor] = []
        views: list[Tensor] = []
        for name, part in parts.items():
            if part.plan.layout is not None:
                arena = reuse.get(name)
                if arena is None or arena.layout != part.plan.layout:
                    arena = Arena(part.plan.layout)
                arenas[name] = arena
                tensors += part.tensors
                views += self._views_of(arena, part)
        self._framework.copy_out(tensors, views)  # all at once, as many at a time copy faster
        return arenas

    def are_copies(self, parts: Mapping[str, Part], arenas: Mapping[str, Arena]) -> bool:
        """Return whether arenas of the parts' layouts hold the bits of their tensors."""
        # Small tensors of a part first: counters of steps, say, tell sooner than weights.
        return self._framework.equal(
            (part.tensors[place], views[place])
            for name, arena in arenas.items()
            for part, views in [(parts[name], self._views_of(arena, parts[name]))]
            for place in part.plan.smallest_first
        )

    def _views_of(self, arena: Arena, part: Part) -> list[Tensor]:
        """Tensors over an arena's bytes, in the order of a part of the same layout."""
        names = part.plan.names
        known = self._views.get(arena)
        if known is None or known[0] != names:
            by_name = self._framework.views(arena, part.tensors)
            known = self._views[arena] = (names, [by_name[name] for name in names])
        return known[1]


def flatten(tree: Any, path: str, tensors: type | UnionType, found: dict[str, Tensor]) -> Json:
    """Return a tree as JSON, and add its tensors to ``found`` by name, such as ``state.0.exp_avg``.

    Each commit walks all tensors, so this loop handles dicts and lists itself: 4 ms for 5,000 tensors.
    `values.encode` takes several times as long. optree and torch's pytree take as long, without names.

    Raises:
        UnsupportedValueError: a value that JSON cannot hold; ``path`` names the tree in the error.
    """

    def tensor(value: Tensor, name: str) -> Json:
        while name in found:
            name += "'"
        found[name] = value
        return {TENSOR: name}

    def leaf(value: Any, where: str) -> Json:  # for a tensor in another container, such as a tuple
        if not isinstance(value, tensors):
            return NotImplemented
        parts = where.removeprefix(path).removeprefix("[").removesuffix("]").split("][")
        return tensor(value, ".".join(part.strip("'\"") for part in parts) or "value")

    def visit(value: Any, keys: tuple[Any, ...], prefix: str) -> Json:
        kind = type(value)
        encoded: Json
        if (
            kind is dict
            and len(keys) < _DEEP
            and set(map(type, value)) <= {str}
            and "$" not in "".join(value)
        ):
            encoded = {}
            for key, item in value.items():
                if isinstance(item, tensors):
                    encoded[key] = tensor(item, prefix + key)
                else:
                    encoded[key] = visit(item, (*keys, key), f"{prefix}{key}.")
            return encoded
        if kind is list and len(keys) < _DEEP and value and type(value[0]) not in _SCALARS:
            encoded = []
            for index, item in enumerate(value):
                if isinstance(item, tensors):
                    encoded.append(tensor(item, f"{prefix}{index}"))
                else:
                    encoded.append(visit(item, (*keys, index), f"{prefix}{index}."))
            return encoded
        return values.encode(value, path + "".join(f"[{key!r}]" for key in keys), leaf)

    return visit(tree, (), "")


_DEEP = 8  # containers; beyond that, `values.encode` finds a container that contains itself
_SCALARS = {type(None), bool, int, float, str}


def rebuild(framework: Framework, structure: Json, arena: Arena | None, *, own: bool) -> Tree:
    """Put a tree together from its JSON and its tensors.

    With ``own``, the tensors have their own memory; else they are views of the arena.
    """
    views = {} if arena is None else framework.views(arena)

    def resolve(tag: str, payload: Any) -> Tensor:
        if tag != TENSOR:
            raise KeyError(tag)
        return framework.clone(views[payload]) if own else views[payload]

    return values.decode(structure, resolve)
