"""What ranks must have in common: models, optimizers, scripts, and shares of the data that fit together.

Each rank describes its state and its script, and sends the others a digest of the description at each
rendezvous. Only if the digests differ are the descriptions themselves compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.digest import digest, digest_numbers
from hvdrecover.errors import ShardsError
from hvdrecover.guard.settings import Guard
from hvdrecover.guard.votes import by_value, first_lines, named
from hvdrecover.state.adapter import Entry, Framework, World
from hvdrecover.state.contents import Contents
from hvdrecover.version import __version__

Description = tuple[Entry, ...]
Samples = npt.NDArray[np.int64]
_LISTED = 5  # samples in a line


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
    """Return the digest of a description."""
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


# -- shares of a data set ------------------------------------------------------------------------------------


def check_shards(world: World, batches: int, samples: Samples | None, length: int = -1) -> None:
    """Compare the shares of a data set on all ranks; all raise ShardsError if they do not fit together.

    Args:
        world: the ranks, all of which must call this.
        batches: how many batches this rank will have.
        samples: the numbers of its samples; None if unknown, on all ranks.
        length: samples of the whole data set; -1 if unknown.
    """
    row = [batches, -1 if samples is None else len(samples), length]
    table = world.allgather(row, "hvdrecover.shards")
    lines = _unequal(*table.T.tolist())
    if not lines and samples is not None and length >= 0:
        dealt = [
            np.frombuffer(each, np.int64) for each in world.gather(samples.tobytes(), "hvdrecover.shards.all")
        ]
        lines = _uncovered(dealt, length)
    if lines:
        raise ShardsError(
            "the ranks' shares of the training data do not fit together",
            lines,
            "Deal the samples out by rank and number of ranks, in one order for all, as ElasticSampler and "
            "elastic_dataset do.",
        )


def _unequal(batches: list[int], samples: list[int], lengths: list[int]) -> list[str]:
    """The counts that differ between the ranks: a line each."""
    lines = []
    if len(set(batches)) > 1:
        fewest = min(batches)
        done = [rank for rank, count in enumerate(batches) if count == fewest]
        waiting = [rank for rank, count in enumerate(batches) if count > fewest]
        follows = f"after batch {fewest}, {named(waiting)} would wait for {named(done)}"
        lines.append(f"batches: {by_value(batches)}; {follows}")
    if len(set(lengths)) > 1:
        lines.append(f"length of the data set: {by_value(lengths)}")
    if len(set(batches)) == 1 and len(set(samples)) > 1:
        lines.append(f"samples: {by_value(samples)}")
    return lines


def _uncovered(dealt: list[Samples], length: int) -> list[str]:
    """The faults in the samples that are dealt out to each rank: a line each.

    A last round that is not full is filled up or left out, so fewer samples than there are ranks may be dealt
    out twice, or not at all.
    """
    outside = [int(((each < 0) | (each >= length)).sum()) for each in dealt]
    if any(outside):
        return [f"numbers that are not a sample's, of {length}: {by_value(outside)}"]
    counts = np.bincount(np.concatenate(dealt), minlength=length)
    repeated, missing = np.flatnonzero(counts > 1), np.flatnonzero(counts == 0)
    lines = []
    if int((counts[repeated] - 1).sum()) >= len(dealt):
        lines.append(f"overlap: {len(repeated)} of {length} samples come more than once: {_some(repeated)}")
    if len(missing) >= len(dealt):
        lines.append(f"missing: {len(missing)} of {length} samples don't come at all: {_some(missing)}")
    return lines


def _some(samples: Samples) -> str:
    listed = ", ".join(map(str, samples[:_LISTED].tolist()))
    return f"{listed}, …" if len(samples) > _LISTED else listed
