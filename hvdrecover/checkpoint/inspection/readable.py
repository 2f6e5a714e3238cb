"""The plain objects of a commit as text, without making them.

`hvdrecover.checkpoint.values.decode` makes them again, for which the program has to define their classes.
Here nothing has to be defined, nothing is imported and no malformed value is an error: this is for people who
look at a commit, also one that somebody else wrote. Characters that a terminal would obey are escaped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.values import Json
from hvdrecover.redaction import printable

_TENSOR = "$tensor"
_DEPTH = 120  # containers; `values.encode` goes no deeper than 100
_FEW = 16  # elements of an array that are shown
_INDENT = "    "

Node = str | tuple[str, list["Node"], str]
"""A text, or what opens a container, its items, and what closes it."""


def text(value: Json, prefix: str = "", width: int | None = None) -> str:
    """A value as Python would write it, more or less.

    Args:
        value: what `hvdrecover.checkpoint.values.encode` gave, or any JSON.
        prefix: what to begin with, such as ``epoch = ``.
        width: how many characters a line may have, where that can be kept; None for one line.
    """
    return "\n".join(_lines(_prefixed(prefix, _node(value, 0)), "", width))


def shortened(value: Json, limit: int = 60) -> str:
    """A value on one line of at most ``limit`` characters."""
    line = text(value)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def differences(a: Json, b: Json) -> dict[str, tuple[str | None, str | None]]:
    """Return where two values differ, apart from tensors.

    Returns:
        Path to the texts of both; None where there is no value.
    """
    return {path.lstrip("."): texts for path, texts in _differences(a, b, "", 0)}


def only_tensors(value: Json) -> bool:
    """Return whether a value is a tensor, or containers of tensors and nothing else."""
    return bool(_count_tensors(value, 0))


def holds_tensors(value: Json) -> bool:
    """Return whether there is a tensor anywhere in a value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if _TENSOR in item:
                return True
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return False


def _count_tensors(value: Json, depth: int) -> int | None:
    """Return how many tensors containers hold; None if they hold anything else too."""
    if isinstance(value, dict) and list(value) == [_TENSOR]:
        return 1
    items = _items(value) if depth < _DEPTH else None
    counts = [] if items is None else [_count_tensors(item, depth + 1) for item in items.values()]
    known = [count for count in counts if count is not None]
    return sum(known) if items is not None and len(known) == len(counts) else None


def _differences(
    a: Json, b: Json, path: str, depth: int
) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    pairs = [_items(side) for side in (a, b)]
    if depth == _DEPTH or pairs[0] is None or pairs[1] is None:
        if a != b or type(a) is not type(b):
            yield path, (shortened(a), shortened(b))
        return
    for step in {**pairs[0], **pairs[1]}:
        inner = path + step
        if step not in pairs[0]:
            if not only_tensors(pairs[1][step]):
                yield inner, (None, shortened(pairs[1][step]))
        elif step not in pairs[1]:
            if not only_tensors(pairs[0][step]):
                yield inner, (shortened(pairs[0][step]), None)
        else:
            yield from _differences(pairs[0][step], pairs[1][step], inner, depth + 1)


def _items(value: Json) -> dict[str, Json] | None:
    """The items of a list or a dict by the way that leads to each; None for what has none to compare."""
    if isinstance(value, list):
        return {f"[{number}]": item for number, item in enumerate(value)}
    if not isinstance(value, dict):
        return None
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {f".{printable(key)}": item for key, item in value.items()}
    pairs = value.get("$dict")
    if isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return {f"[{shortened(key)}]": item for key, item in pairs}
    return None


def _node(value: Json, depth: int) -> Node:
    if depth == _DEPTH:
        return "…"
    if not isinstance(value, list | dict):
        return repr(value)
    if isinstance(value, dict) and list(value) == [_TENSOR]:
        return f"<tensor {printable(str(value[_TENSOR]))}>"
    if count := _count_tensors(value, depth):
        return f"<{count} tensors>"
    if isinstance(value, list):
        return "[", [_node(item, depth + 1) for item in value], "]"
    tag = next(iter(value), "")
    if tag.startswith("$") and len(value) == 1:
        try:
            return _tagged(tag, value[tag], lambda item: _node(item, depth + 1))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            pass  # malformed, so it is shown as it is
    return "{", [_prefixed(f"{key!r}: ", _node(item, depth + 1)) for key, item in value.items()], "}"


def _tagged(tag: str, payload: Any, inner: Callable[[Json], Node]) -> Node:
    if tag in _SEQUENCES:
        opening, closing = _SEQUENCES[tag]
        if tag == "$tuple" and len(payload) == 1:
            closing = ",)"
        return opening, [inner(item) for item in _list(payload)], closing
    if tag in _MAPPINGS:
        opening, closing = _MAPPINGS[tag]
        return opening, [_prefixed(f"{_flat(inner(key))}: ", inner(item)) for key, item in payload], closing
    if tag == "$deque":
        items, longest = payload
        return "deque([", [inner(item) for item in _list(items)], f"], maxlen={longest!r})"
    if tag == "$enum":
        return f"{_class(payload[0])}.{printable(payload[1])}"
    if tag == "$namedtuple":
        return f"{_class(payload[0])}(", [inner(item) for item in _list(payload[1])], ")"
    if tag == "$dataclass":
        name, fields, others = payload
        pairs = itertools.chain(fields.items(), others.items())
        return f"{_class(name)}(", [_prefixed(f"{printable(key)}=", inner(item)) for key, item in pairs], ")"
    return _leaf(values.decode({tag: payload}))


_SEQUENCES = {"$tuple": ("(", ")"), "$set": ("{", "}"), "$frozenset": ("frozenset({", "})")}
_MAPPINGS = {"$dict": ("{", "}"), "$ordereddict": ("OrderedDict({", "})"), "$counter": ("Counter({", "})")}


def _leaf(value: Any) -> str:
    """A value that `values.decode` made without looking for a class."""
    if isinstance(value, np.ndarray) and value.size > _FEW:
        return f"<array {value.dtype.str}{list(value.shape)}>"
    return printable(" ".join(repr(value).split()))


def _list(payload: Any) -> list[Json]:
    if not isinstance(payload, list):
        raise TypeError(f"{payload!r} is not a list")
    return payload


def _class(name: str) -> str:
    """``module:Outer.Inner`` as ``Inner``."""
    return printable(name.rpartition(":")[2].rpartition(".")[2])


def _prefixed(prefix: str, node: Node) -> Node:
    return prefix + node if isinstance(node, str) else (prefix + node[0], node[1], node[2])


def _flat(node: Node) -> str:
    return node if isinstance(node, str) else node[0] + ", ".join(map(_flat, node[1])) + node[2]


def _lines(node: Node, indent: str, width: int | None) -> Iterator[str]:
    line = indent + _flat(node)
    if isinstance(node, str) or not node[1] or width is None or len(line) <= width:
        yield line
        return
    yield indent + node[0]
    for child in node[1]:
        *others, last = _lines(child, indent + _INDENT, width - 1)
        yield from others
        yield last + ","
    yield indent + node[2]
