"""Trees of tensors and plain values: copied into JSON and arenas again and again, and rebuilt from them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdrecover.checkpoint import layout, values
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import Layout, TensorSpec
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.commits.outline import TENSOR, Outline
from hvdrecover.elastic.interfaces import Framework, Tensor, Tree
from hvdrecover.errors import UnsupportedTensorError


@dataclass(frozen=True)
class Part:
    """One tree, taken apart; nothing is copied yet.

    Attributes:
        outline: the tree without its tensors' content.
        tensors: the tensors themselves, in the outline's order.
        specs: dtypes and shapes, in the same order.
        layout: where the tensors lie in an arena; None if there are none.
        smallest_first: the tensors' places in the order, by size.
    """

    outline: Outline
    tensors: Sequence[Tensor]
    specs: Sequence[TensorSpec]
    layout: Layout | None
    smallest_first: Sequence[int]


class Copier:
    """Copies the same trees at every commit, and remembers what does not change in between.

    Args:
        framework: whose tensors the trees hold.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._parts: dict[str, Part] = {}
        # Names in some part's order, and views in the same. An arena that is let go must not be kept by them.
        self._views: weakref.WeakKeyDictionary[Arena, tuple[Sequence[str], list[Tensor]]]
        self._views = weakref.WeakKeyDictionary()

    def take_apart(self, trees: Mapping[str, Tree]) -> dict[str, Part]:
        """Take trees apart, by attribute name.

        Raises:
            UnsupportedTensorError: a tensor that safetensors can't hold.
            UnsupportedValueError: a value that JSON can't hold.
        """
        parts = {
            name: self._renewed(name, tree) or self._from_scratch(name, tree) for name, tree in trees.items()
        }
        # What is remembered must not keep alive tensors that the user lets go.
        self._parts = {name: replace(part, tensors=()) for name, part in parts.items()}
        return parts

    def copy(self, parts: Mapping[str, Part], reuse: Mapping[str, Arena]) -> dict[str, Arena]:
        """Copy the tensors of parts.

        Args:
            parts: what `take_apart` gave.
            reuse: arenas that may be overwritten, by attribute name; one of another layout is replaced.

        Returns:
            An arena for each part that has tensors.
        """
        arenas = {}
        tensors: list[Tensor] = []
        views: list[Tensor] = []
        for name, part in parts.items():
            if part.layout is not None:
                arena = reuse.get(name)
                fits = arena is not None and arena.layout == part.layout
                arenas[name] = arena if arena is not None and fits else Arena(part.layout)
                tensors += part.tensors
                views += self._views_of(arenas[name], part)
        self._framework.copy_out(tensors, views)  # all at once, as many at a time copy faster
        return arenas

    def is_copy(
        self, parts: Mapping[str, Part], structure: Mapping[str, Json], arenas: Mapping[str, Arena]
    ) -> bool:
        """Return whether `copy` would make these very bits of the parts; stops at the first difference.

        Small tensors of a part are looked at first: counters of steps, say, tell sooner than weights.
        """
        if structure != {name: part.outline.structure for name, part in parts.items()}:
            return False
        for name, part in parts.items():
            arena = arenas.get(name)
            if part.layout != (None if arena is None else arena.layout):
                return False
        return self._framework.equal(self._pairs(parts, arenas))

    def _pairs(
        self, parts: Mapping[str, Part], arenas: Mapping[str, Arena]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for name, arena in arenas.items():
            part, views = parts[name], self._views_of(arena, parts[name])
            for place in part.smallest_first:
                yield part.tensors[place], views[place]

    def _renewed(self, name: str, tree: Tree) -> Part | None:
        """Take a tree apart that is like the last one of this name; None if it isn't."""
        last = self._parts.get(name)
        renewed = last.outline.renew(tree, self._framework.is_tensor) if last is not None else None
        if last is None or renewed is None or not self._framework.match(renewed[1], last.specs):
            return None
        outline, tensors = renewed
        return replace(last, outline=outline, tensors=tensors)

    def _from_scratch(self, name: str, tree: Tree) -> Part:
        outline, tensors = Outline.of(tree, f"state.{name}", self._framework.is_tensor)
        specs = [self._spec(name, key, tensor) for key, tensor in zip(outline.names, tensors, strict=True)]
        smallest_first = sorted(range(len(specs)), key=lambda place: specs[place].nbytes)
        return Part(outline, tensors, specs, layout.plan(specs) if specs else None, smallest_first)

    def _spec(self, name: str, key: str, tensor: Tensor) -> TensorSpec:
        try:
            return self._framework.spec(tensor, key)
        except UnsupportedTensorError as error:
            raise UnsupportedTensorError(f"state.{name}.{key}", str(error).removeprefix(f"{key}: ")) from None

    def _views_of(self, arena: Arena, part: Part) -> list[Tensor]:
        """Tensors over an arena's bytes, in the order of a part of the same layout."""
        names = part.outline.names
        known = self._views.get(arena)
        if known is None or known[0] != names:
            by_name = self._framework.views(arena)
            self._framework.pin(arena, part.tensors)
            known = self._views[arena] = (names, [by_name[name] for name in names])
        return known[1]


def rebuild(framework: Framework, structure: Json, arena: Arena | None, *, own: bool) -> Tree:
    """Put a tree together.

    Args:
        framework: whose tensors to make.
        structure: the tree's structure.
        arena: its tensors.
        own: whether the tensors have memory of their own; otherwise they are views of the arena.

    Raises:
        ValueError: the structure is malformed, or names a tensor that the arena lacks.
    """
    views = {} if arena is None else framework.views(arena)

    def resolve(tag: str, payload: Any) -> Tensor:
        if tag != TENSOR:
            raise KeyError(tag)
        return framework.clone(views[payload]) if own else views[payload]

    return values.decode(structure, resolve)
