"""What differs between two commits as witnesses tell of them, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hvdrecover.checkpoint.values import Json
from hvdrecover.drill.testimony import Made

_SHOWN = 3  # names in a list
_MOST = 6  # differences in a message
_LONG = 40  # characters of a value


def between(expected: Made, found: Made) -> list[str]:
    """What differs, in a few words each; empty if they are the same, bit by bit."""
    lines = []
    for name, tensors in expected.tensors.items():
        others = found.tensors.get(name, {})
        if differing := [tensor for tensor, digest in tensors.items() if others.get(tensor) != digest]:
            lines.append(f"{len(differing)} of {len(tensors)} tensors of {name} ({some(differing)})")
    pairs = {**_unlike(expected.values, found.values, ""), **_unlike(expected.samplers, found.samplers, "")}
    lines += [f"{path.removeprefix('.')} is {theirs}, not {mine}" for path, (mine, theirs) in pairs.items()]
    return lines[:_MOST]


def some(names: Iterable[object]) -> str:
    """The first of some names."""
    every = [str(name) for name in names]
    return ", ".join(every[:_SHOWN] + ["…"] * (len(every) > _SHOWN)) or "none"


def _unlike(mine: Json, theirs: Json, path: str) -> dict[str, tuple[str, str]]:
    """Paths at which values differ, with both as text."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        pairs = {f"{path}.{key}": (mine.get(key), theirs.get(key)) for key in {**mine, **theirs}}
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        pairs = {f"{path}.{place}": pair for place, pair in enumerate(zip(mine, theirs, strict=True))}
    else:
        return {} if mine == theirs else {path: (json.dumps(mine)[:_LONG], json.dumps(theirs)[:_LONG])}
    found: dict[str, tuple[str, str]] = {}
    for place, (one, other) in pairs.items():
        found.update(_unlike(one, other, place))
    return found
