"""The structure that ranks must have in common: models, optimizers, data sets, scripts.

Each rank describes what it was started with, and sends the others a digest of that at each rendezvous.
Only if the digests differ are the descriptions themselves compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hvdrecover.checkpoint.digest import digest, digest_numbers
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.elastic.guard.votes import by_value, named
from hvdrecover.elastic.interfaces import Entry, Framework
from hvdrecover.version import __version__

_LISTED = 10  # differences in an error; all others are counted


@dataclass(frozen=True)
class Description:
    """The structure that a rank was started with.

    Attributes:
        entries: all of it, in the order of the script.
        fresh: whether this is the rank's first rendezvous.
    """

    entries: tuple[Entry, ...]
    fresh: bool = True

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Description:
        """Return what `as_json` gave."""
        entries = tuple(Entry(**entry) for entry in fields["entries"])
        return cls(entries, bool(fields["fresh"]))


def describe(guard: Guard, framework: Framework, contents: Contents) -> tuple[Entry, ...]:
    """Describe a state's guard and attributes, the versions at work and the training script."""
    versions = {**framework.versions(), "hvdrecover": __version__}
    entries = [Entry(f"version of {name}", version) for name, version in versions.items()]
    entries.append(Entry("training script", _script()))
    entries.append(Entry("guard", str(guard)))
    if guard.data is not None:
        entries.append(Entry("training data", digest(json.dumps(guard.data.as_json()).encode())))
    for name, value in contents.values.items():
        if name in contents.orders:
            facts = {**contents.orders[name].counts_in(), "tail": contents.orders[name].tail}
            entries += [Entry(f"{name}.{fact}", str(each)) for fact, each in facts.items()]
        elif framework.is_component(value):
            entries += [replace(each, name=f"{name}{each.name}") for each in framework.describe(value)]
        else:
            entries.append(Entry(name, f"a {type(value).__name__}"))
    return tuple(entries)


def numbers(entries: Sequence[Entry]) -> tuple[int, int]:
    """Return what a rank sends of its description: 16 bytes that tell it from any other."""
    return digest_numbers("\0".join(f"{entry.name}\0{entry.value}" for entry in entries).encode())


def differences(described: Sequence[Description | None]) -> list[str]:
    """Return what the ranks don't have in common: a line each, the first ones only.

    Settings are compared only if all ranks have just been started: others were started in a job of another
    size, or have trained since.

    Args:
        described: by rank; None of a rank without a guard.
    """
    unguarded = [rank for rank, each in enumerate(described) if each is None]
    if unguarded:
        return [f"guard: none on {named(unguarded)}"] if len(unguarded) < len(described) else []
    all_described = [each for each in described if each is not None]
    comparable = all(each.fresh for each in all_described)
    tables = [
        {entry.name: entry.value for entry in each.entries if comparable or not entry.setting}
        for each in all_described
    ]
    lines = [
        f"{name}: {by_value([table.get(name, 'missing') for table in tables])}"
        for name in dict.fromkeys(name for table in tables for name in table)
        if len({table.get(name) for table in tables}) > 1
    ]
    if not lines:
        lines = _other_order([list(table) for table in tables])
    hidden = len(lines) - _LISTED
    return [*lines[:_LISTED], f"and {hidden} more"] if hidden > 0 else lines


def _other_order(names: Sequence[Sequence[str]]) -> list[str]:
    for place in zip_longest(*names):
        if len(set(place)) > 1:
            return [f"the order differs, first at: {by_value([str(name) for name in place])}"]
    return []


def _script() -> str:
    """The script's file name and digest; what is typed in has none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return f"{Path(file).name}, {digest(Path(file).read_bytes())}" if file else "none"
    except OSError:
        return "none"
