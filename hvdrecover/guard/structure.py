"""What ranks must have in common: models, optimizers and scripts.

Each rank describes its state and its script, and sends the others a digest of the description at each
rendezvous. Only if the digests differ are the descriptions themselves compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdrecover.checkpoint.arena import digest, digest_numbers
from hvdrecover.guard.settings import Guard
from hvdrecover.guard.votes import by_value, first_lines, named
from hvdrecover.state.adapter import Entry, Framework
from hvdrecover.state.contents import Contents
from hvdrecover.version import __version__

Description = tuple[Entry, ...]


def describe(guard: Guard, framework: Framework, contents: Contents) -> Description:
    """Describe a state's guard and attributes, the versions at work and the training script."""
    versions = {**framework.versions(), "hvdrecover": __version__}
    entries = [Entry(f"version of {name}", version) for name, version in versions.items()]
    entries += [Entry("training script", _script()), Entry("guard", str(guard))]
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


def numbers(description: Description) -> tuple[int, int]:
    return digest_numbers("\0".join(f"{each.name}\0{each.value}" for each in description).encode())


def differences(descriptions: Sequence[Description | None], *, settings: bool) -> list[str]:
    """Return the differences between the ranks: a line each, the first ones only.

    A rank without a guard has no description. ``settings`` compares hyper-parameters as well.
    """
    unguarded = [rank for rank, each in enumerate(descriptions) if each is None]
    if unguarded:
        return [f"guard: none on {named(unguarded)}"] if len(unguarded) < len(descriptions) else []
    tables = [
        {entry.name: entry.value for entry in each or () if settings or not entry.setting}
        for each in descriptions
    ]
    lines = [
        f"{name}: {by_value([table.get(name, 'missing') for table in tables])}"
        for name in dict.fromkeys(name for table in tables for name in table)
        if len({table.get(name) for table in tables}) > 1
    ]
    if not lines and len({tuple(table) for table in tables}) > 1:
        lines = ["the same parameters, in another order"]
    return first_lines(lines)


def _script() -> str:
    """The script's file name and digest; a program that is typed in has none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return f"{Path(file).name}, {digest(Path(file).read_bytes())}" if file else "none"
    except OSError:
        return "none"
