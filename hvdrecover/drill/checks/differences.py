"""The differences between two commits as witnesses report them, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hvdrecover.checkpoint.values import Json
from hvdrecover.drill.testimony import Made

_SHOWN = 3  # names in a list
_MOST = 6  # differences in a message
_LONG = 40  # characters of a value


@dataclass(frozen=True)
class Differences:
    """The differences between two commits.

    Attributes:
        tensors: attribute to the names of its tensors.
        values: path of a value, such as ``stats.loss``, to both as text.
        cursors: the same of samplers.
    """

    tensors: Mapping[str, tuple[str, ...]]
    values: Mapping[str, tuple[str, str]]
    cursors: Mapping[str, tuple[str, str]]


def of(expected: Made, found: Made) -> Differences:
    """See what differs, bit by bit."""
    tensors = {}
    for name, each in expected.tensors.items():
        others = found.tensors.get(name, {})
        if differing := tuple(tensor for tensor, digest in each.items() if others.get(tensor) != digest):
            tensors[name] = differing
    values, cursors = (
        {path.removeprefix("."): pair for path, pair in _unlike(mine, theirs, "").items()}
        for mine, theirs in ((expected.values, found.values), (expected.samplers, found.samplers))
    )
    return Differences(tensors, values, cursors)


def in_words(differences: Differences, expected: Made) -> list[str]:
    """The differences from an expected commit, in a few words each; empty if there are none."""
    lines = [
        f"{len(names)} of {len(expected.tensors[name])} tensors of {name} ({some(names)})"
        for name, names in differences.tensors.items()
    ]
    pairs = {**differences.values, **differences.cursors}
    lines += [f"{path} is {theirs}, not {mine}" for path, (mine, theirs) in pairs.items()]
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
