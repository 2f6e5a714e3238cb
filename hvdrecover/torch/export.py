"""A commit as a plain ``torch.save`` file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.inspection import chosen, written_aside
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.root import read_commit
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import ExportError
from hvdrecover.state.adapter import rebuild
from hvdrecover.torch.framework import TorchFramework


def to_torch(
    storage: Storage, commit: CommitId, only: Sequence[str], path: Path, *, force: bool
) -> list[str]:
    """Write attributes, all if ``only`` is empty, to a file for ``torch.load(path, weights_only=True)``.

    The file holds a dict: attribute name to its ``state_dict``, plain object, or cursor if it is a sampler.
    Every byte that is read is verified. Return the names of the attributes.

    Raises:
        ExportError: the file exists, an attribute is missing, or one holds an object of a kind that such a
            file can't hold without code, such as a dataclass.
    """
    url = f"{storage.url}/{commit.name}"
    with written_aside(path, force=force) as aside:
        snapshot = read_commit(storage, commit, only or None)
        names = chosen(snapshot, only, url)
        exported, refused = {}, {}
        for name in names:
            try:
                exported[name] = _value_of(snapshot, name)
            except ValueError as error:
                refused[name] = str(error)
        with aside.open("xb") as file:
            torch.save(exported, file)
        if get_unsafe_globals_in_checkpoint(aside):
            refused |= {name: kinds for name, each in exported.items() if (kinds := _code_in(each))}
        if refused:
            listing = "; ".join(f"{name} ({reason})" for name, reason in refused.items())
            raise ExportError(
                url,
                f"a torch file that is loaded without running code can't hold {listing}; name other "
                "attributes with --only",
            )
    return names


def _value_of(snapshot: Snapshot, name: str) -> Any:
    if name in snapshot.samplers:
        return snapshot.samplers[name]
    return rebuild(TorchFramework(), snapshot.attributes[name], snapshot.arenas.get(name), own=False)


def _code_in(value: Any) -> str:
    """Return the names of the classes for which ``torch.load(weights_only=True)`` would have to run code."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return ", ".join(get_unsafe_globals_in_checkpoint(file))
