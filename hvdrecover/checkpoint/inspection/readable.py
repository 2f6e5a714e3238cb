"""The plain objects of a commit as text, without making them.

`hvdrecover.checkpoint.values.decode` makes them, for which the program has to define their classes. Here
nothing is imported and no malformed value is an error: this is for people who look at a commit, also one that
another user wrote. Control characters, which a terminal would execute, are escaped.
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
_SEQUENCES = {"$tuple": "({})", "$set": "{{{}}}", "$frozenset": "frozenset({{{}}})"}
_MAPPINGS = {"$dict": "{{{}}}", "$ordereddict": "OrderedDict({{{}}})", "$counter": "Counter({{{}}})"}


def text(value: Json, depth: int = 0) -> str:
    """Return an encoded value, or any JSON, as Python would write it, on one line.

    Args:
        value: `hvdrecover.checkpoint.values.encode` gave it.
        depth: how many containers it lies in.
    """
    if depth == _DEPTH:
        return "…"
    if not isinstance(value, list | dict):
        return repr(value)
    if isinstance(value, dict) and list(value) == [_TENSOR]:
        return f"<tensor {printable(str(value[_TENSOR]))}>"
    if count := _count_tensors(value, 0):
        return f"<{count} tensors>"

    def inner(item: Json) -> str:
        return text(item, depth + 1)

    if isinstance(value, list):
        return f"[{', '.join(map(inner, value))}]"
    tag = next(iter(value), "")
    if tag.startswith("$") and len(value) == 1:
        try:
            return _tagged(tag, value[tag], inner)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            pass  # malformed: show the JSON
    return "{" + ", ".join(f"{key!r}: {inner(item)}" for key, item in value.items()) + "}"


def shortened(value: Json, limit: int = 60) -> str:
    """Return a value on one line of at most ``limit`` characters."""
    line = text(value)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def differences(a: Json, b: Json) -> dict[str, tuple[str | None, str | None]]:
    """Return where two values differ, apart from tensors: path to both texts, None for a missing value."""
    return {path.lstrip("."): texts for path, texts in _differences(a, b, "", 0)}


def only_tensors(value: Json) -> bool:
    """Return whether a value is a tensor, or containers that hold only tensors."""
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
    if items is None:
        return None
    total = 0
    for item in items.values():
        count = _count_tensors(item, depth + 1)
        if count is None:
            return None
        total += count
    return total


def _differences(
    a: Json, b: Json, path: str, depth: int
) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    before, after = _items(a), _items(b)
    if depth == _DEPTH or before is None or after is None:
        if a != b or type(a) is not type(b):
            yield path, (shortened(a), shortened(b))
        return
    for step in {**before, **after}:
        if step in before and step in after:
            yield from _differences(before[step], after[step], path + step, depth + 1)
        elif not only_tensors({**before, **after}[step]):
            texts = [shortened(side[step]) if step in side else None for side in (before, after)]
            yield path + step, (texts[0], texts[1])


def _items(value: Json) -> dict[str, Json] | None:
    """Return the items of a list or a dict by their step of the path; None for values without items."""
    if isinstance(value, list):
        return {f"[{number}]": item for number, item in enumerate(value)}
    if not isinstance(value, dict):
        return None
    if not next(iter(value), "").startswith("$"):
        return {f".{printable(key)}": item for key, item in value.items()}
    pairs = value.get("$dict")
    if isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return {f"[{shortened(key)}]": item for key, item in pairs}
    return None


def _tagged(tag: str, payload: Any, inner: Callable[[Json], str]) -> str:
    if tag in _SEQUENCES:
        comma = "," if tag == "$tuple" and len(payload) == 1 else ""
        return _SEQUENCES[tag].format(", ".join(map(inner, _list(payload))) + comma)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag].format(", ".join(f"{inner(key)}: {inner(item)}" for key, item in payload))
    if tag == "$deque":
        items, longest = payload
        return f"deque([{', '.join(map(inner, _list(items)))}], maxlen={longest!r})"
    if tag == "$enum":
        return f"{_class(payload[0])}.{printable(payload[1])}"
    if tag == "$namedtuple":
        return f"{_class(payload[0])}({', '.join(map(inner, _list(payload[1])))})"
    if tag == "$dataclass":
        name, fields, others = payload
        pairs = itertools.chain(fields.items(), others.items())
        return f"{_class(name)}({', '.join(f'{printable(key)}={inner(item)}' for key, item in pairs)})"
    made = values.decode({tag: payload})  # of the other kinds, none looks for a class
    if isinstance(made, np.ndarray) and made.size > _FEW:
        return f"<array {made.dtype.str}{list(made.shape)}>"
    return printable(" ".join(repr(made).split()))


def _list(payload: Any) -> list[Json]:
    if not isinstance(payload, list):
        raise TypeError(f"{payload!r} is not a list")
    return payload


def _class(name: str) -> str:
    """``module:Outer.Inner`` as ``Inner``."""
    return printable(name.rpartition(":")[2].rpartition(".")[2])
