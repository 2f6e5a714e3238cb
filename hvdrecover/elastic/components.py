"""Trees of tensors and plain values, taken apart into JSON and arenas, and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdrecover.checkpoint import layout, values
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.interfaces import Framework, Tensor, Tree
from hvdrecover.errors import UnsupportedTensorError

_TENSOR = "$tensor"


def capture(
    framework: Framework, trees: Mapping[str, Tree], reuse: Mapping[str, Arena]
) -> tuple[dict[str, Json], dict[str, Arena]]:
    """Copy trees into JSON and arenas.

    Args:
        framework: whose tensors the trees hold.
        trees: by attribute name.
        reuse: arenas that may be overwritten, by attribute name; one of another layout is replaced.

    Returns:
        Each tree's structure as JSON, and an arena for each tree that holds tensors, by attribute name.

    Raises:
        UnsupportedTensorError: a tensor that safetensors can't hold. Nothing was copied.
        UnsupportedValueError: a value that JSON can't hold. Nothing was copied.
    """
    structure: dict[str, Json] = {}
    arenas: dict[str, Arena] = {}
    found: dict[str, dict[str, Tensor]] = {}
    for name, tree in trees.items():
        structure[name], tensors = _take_apart(framework, name, tree)
        if tensors:
            planned = layout.plan([_spec(framework, name, key, tensor) for key, tensor in tensors.items()])
            arena = reuse.get(name)
            arenas[name] = arena if arena is not None and arena.layout == planned else Arena(planned)
            found[name] = tensors
    for name, tensors in found.items():  # only now, when all that can be refused has been
        views = framework.views(arenas[name])
        framework.copy_out(list(tensors.values()), [views[key] for key in tensors])
    return structure, arenas


def is_copy(
    framework: Framework,
    structure: Mapping[str, Json],
    arenas: Mapping[str, Arena],
    trees: Mapping[str, Tree],
) -> bool:
    """Whether what `capture` gave is what it would give now; stops at the first difference."""
    for name, tree in trees.items():
        present, tensors = _take_apart(framework, name, tree)
        if present != structure.get(name) or bool(tensors) != (name in arenas):
            return False
        views = framework.views(arenas[name]) if tensors else {}
        for key, tensor in tensors.items():
            if framework.spec(tensor, key) != arenas[name].layout.by_name.get(key):
                return False
            if not framework.equals(tensor, views[key]):
                return False
    return trees.keys() == structure.keys()


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
        if tag != _TENSOR:
            raise KeyError(tag)
        return framework.clone(views[payload]) if own else views[payload]

    return values.decode(structure, resolve)


def _spec(framework: Framework, name: str, key: str, tensor: Tensor) -> TensorSpec:
    try:
        return framework.spec(tensor, key)
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(f"state.{name}.{key}", str(error).removeprefix(f"{key}: ")) from None


def _take_apart(framework: Framework, name: str, tree: Tree) -> tuple[Json, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}

    def leaf(value: Any, path: str) -> Json:
        if not framework.is_tensor(value):
            return NotImplemented
        key = _tensor_name(path.removeprefix(f"state.{name}"))
        while key in tensors:
            key += "'"
        tensors[key] = value
        return {_TENSOR: key}

    return values.encode(tree, f"state.{name}", leaf), tensors


def _tensor_name(path: str) -> str:
    """``['state'][0]['exp_avg']`` as ``state.0.exp_avg``."""
    parts = path.removeprefix("[").removesuffix("]").split("][")
    return ".".join(part.strip("'\"") for part in parts) or "value"
