"""Rank-local state of one commit: plain objects that differ between the ranks, and running statistics.

After a recovery all ranks hold one rank's copy of it: a running loss resumes from another rank's. Nobody
would notice, so that is told beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.snapshot import Snapshot

REMEDY = "Average it over the ranks before you commit it, or keep it out of the state."

_LONG = 24  # characters of a value
_LISTED = 4  # ranks whose value is shown
_SHOWN = 3  # names of tensors

Buffers = Mapping[str, Collection[str]]
"""Names of tensors that each rank has its own of, by attribute; all components are there."""
Found = dict[str, tuple[str, str]]
"""By name, a digest and a few words; names of running statistics begin with their attribute's."""


def found(snapshot: Snapshot, buffers: Buffers) -> Found:
    """Return what a commit holds that ranks may have their own of.

    Args:
        snapshot: the commit.
        buffers: the components' names of tensors.
    """
    mine: Found = {}
    for name, structure in snapshot.state["attributes"].items():
        if name in buffers:
            continue
        digest, text = Digest(), json.dumps(structure, sort_keys=True)
        digest.update(text.encode())
        if name in snapshot.arenas:
            digest.update(snapshot.arenas[name].buffer)
        mine[name] = digest.hex(), "" if name in snapshot.arenas else text[:_LONG]
    for name, tensors in buffers.items():
        arena = snapshot.arenas.get(name)
        for tensor in sorted(tensors):
            if arena is None or tensor not in arena.layout.by_name:
                continue  # what a module keeps beside tensors
            digest = Digest()
            digest.update(arena.bytes_of(tensor))
            mine[f"{name}.{tensor}"] = digest.hex(), ""
    return mine


def ballot(snapshot: Snapshot | None, buffers: Callable[[], Buffers]) -> list[int]:
    """A digest of all that as two numbers, with 1 before it; zeros if there is nothing to be compared.

    Args:
        snapshot: the commit, if there is one.
        buffers: gives the components' names of tensors.
    """
    if snapshot is None:
        return [0, 0, 0]
    digest = Digest()
    digest.update(json.dumps(found(snapshot, buffers()), sort_keys=True).encode())
    return [1, *digest.numbers()]


def differ(ballots: npt.NDArray[np.int64]) -> bool:
    """Return whether all ranks have something to be compared, and not the same."""
    return bool(ballots[:, 0].all() and (ballots != ballots[0]).any())


def differences(rows: Mapping[int, Any]) -> list[str]:
    """Return what ranks hold differently: a line for each plain object, and one for all running statistics.

    Args:
        rows: by rank, what `found` gave.
    """
    names = dict.fromkeys(name for row in rows.values() for name in row)
    differing = [name for name in names if len({row.get(name, ("",))[0] for row in rows.values()}) > 1]
    plain = [name for name in differing if "." not in name]
    buffers = [name for name in differing if "." in name]
    lines = [f"state.{name} differs between the ranks{_values(name, rows)}" for name in plain]
    if buffers:
        shown = ", ".join([*buffers[:_SHOWN], *(["…"] if len(buffers) > _SHOWN else [])])
        lines.append(f"running statistics are each rank's own ({shown})")
    return lines


def _values(name: str, rows: Mapping[int, Any]) -> str:
    texts = [f"rank {rank}: {row[name][1]}" for rank, row in rows.items() if name in row and row[name][1]]
    return f" ({', '.join([*texts[:_LISTED], *(['…'] if len(texts) > _LISTED else [])])})" if texts else ""
