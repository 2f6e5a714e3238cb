"""The outline of a tree: its containers and plain values without its tensors, as JSON.

Taking a tree apart from scratch visits every value, names every tensor and checks that JSON can hold the
rest: tens of milliseconds for thousands of tensors. But from one commit to the next little changes beside
the tensors' content. So an outline remembers the tree that it was made of, and `Outline.renew` follows
another one along the same lines: it collects the tensors, encodes plain values anew, and shares with the old
JSON what has not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.interfaces import Tensor, Tree

TENSOR = "$tensor"

IsTensor = Callable[[Any], bool]


class Outline:
    """A tree without its tensors' content. Never changes, and neither may its JSON be changed.

    Attributes:
        structure: the tree as JSON; a tensor is ``{"$tensor": name}``.
        names: the tensors' names, in the order in which the tensors are found.
    """

    def __init__(self, structure: Json, names: Sequence[str], root: _Node | None) -> None:
        self.structure = structure
        self.names = names
        self._root = root

    @classmethod
    def of(cls, tree: Tree, path: str, is_tensor: IsTensor) -> tuple[Outline, list[Tensor]]:
        """Take a tree apart.

        Args:
            tree: nested containers of plain values and tensors.
            path: what the tree is called in an error.
            is_tensor: tells tensors.

        Raises:
            UnsupportedValueError: a value that JSON can't hold.
        """
        tensors: dict[str, Tensor] = {}

        def leaf(value: Any, where: str) -> Json:
            if not is_tensor(value):
                return NotImplemented
            key = _tensor_name(where.removeprefix(path))
            while key in tensors:
                key += "'"
            tensors[key] = value
            return {TENSOR: key}

        structure = values.encode(tree, path, leaf)
        outline = cls(structure, list(tensors), _node(tree, structure, path, is_tensor))
        if outline.renew(tree, is_tensor) is None:
            outline._root = None  # tensors inside, say, a tuple: taken apart from scratch every time
        return outline, list(tensors.values())

    def renew(self, tree: Tree, is_tensor: IsTensor) -> tuple[Outline, list[Tensor]] | None:
        """Take a tree apart that has tensors at the same places, and containers of the same keys.

        Returns:
            The outline, with the same names, and the tensors; or None if the tree is not of that kind.

        Raises:
            UnsupportedValueError: a value that JSON can't hold.
        """
        if self._root is None:
            return None
        tensors: list[Tensor] = []
        try:
            root = self._root.renew(tree, is_tensor, tensors)
        except _OtherStructureError:
            return None
        return (self if root is self._root else Outline(root.json, self.names, root)), tensors


class _OtherStructureError(Exception):
    """A tree does not have the structure of the one before."""


class _Node(Protocol):
    """One value of a tree. `renew` gives the node itself if the JSON of the other value is the same."""

    json: Json

    def renew(self, value: Any, is_tensor: IsTensor, tensors: list[Tensor]) -> _Node: ...


class _Tensor:
    __slots__ = ("json",)

    def __init__(self, json: Json) -> None:
        self.json = json

    def renew(self, value: Any, is_tensor: IsTensor, tensors: list[Tensor]) -> _Node:
        if not is_tensor(value):
            raise _OtherStructureError
        tensors.append(value)
        return self


class _Plain:
    """A value without tensors inside; ``value`` is kept of immutable ones, to know them again."""

    __slots__ = ("json", "path", "value")

    def __init__(self, value: Any, json: Json, path: str) -> None:
        self.value = value if type(value) in _SCALARS else _Plain  # which no value is
        self.json = json
        self.path = path

    def renew(self, value: Any, is_tensor: IsTensor, tensors: list[Tensor]) -> _Node:
        if value is self.value:
            return self

        def leaf(inner: Any, where: str) -> Json:
            if is_tensor(inner):
                raise _OtherStructureError
            return NotImplemented

        return _Plain(value, values.encode(value, self.path, leaf), self.path)


class _List:
    __slots__ = ("children", "json")

    def __init__(self, children: list[_Node]) -> None:
        self.children = children
        self.json = [child.json for child in children]

    def renew(self, value: Any, is_tensor: IsTensor, tensors: list[Tensor]) -> _Node:
        if type(value) is not list or len(value) != len(self.children):
            raise _OtherStructureError
        children = [
            child.renew(item, is_tensor, tensors) for child, item in zip(self.children, value, strict=True)
        ]
        return self if children == self.children else _List(children)


class _Dict:
    __slots__ = ("children", "json", "keys")

    def __init__(self, keys: list[Any], children: list[_Node]) -> None:
        self.keys = keys
        self.children = children
        self.json = values.join_dict(keys, [child.json for child in children])

    def renew(self, value: Any, is_tensor: IsTensor, tensors: list[Tensor]) -> _Node:
        if type(value) is not dict or list(value) != self.keys:
            raise _OtherStructureError
        children = [
            child.renew(item, is_tensor, tensors)
            for child, item in zip(self.children, value.values(), strict=True)
        ]
        return self if children == self.children else _Dict(self.keys, children)


_SCALARS = {type(None), bool, int, float, str}


def _node(value: Any, json: Json, path: str, is_tensor: IsTensor) -> _Node:
    """The node of a value that has been encoded."""
    if is_tensor(value):
        return _Tensor(json)
    kind = type(value)
    if kind is list and not {type(item) for item in value} <= _SCALARS:
        pairs = enumerate(zip(value, json, strict=True))
        return _List([_node(item, inner, f"{path}[{at}]", is_tensor) for at, (item, inner) in pairs])
    if kind is dict and {type(key) for key in value} <= {int, str}:
        inners = zip(value.items(), values.split_dict(json), strict=True)
        children = [_node(item, inner, f"{path}[{key!r}]", is_tensor) for (key, item), inner in inners]
        return _Dict(list(value), children)
    return _Plain(value, json, path)


def _tensor_name(path: str) -> str:
    """``['state'][0]['exp_avg']`` as ``state.0.exp_avg``."""
    parts = path.removeprefix("[").removesuffix("]").split("][")
    return ".".join(part.strip("'\"") for part in parts) or "value"
