"""A commit as a plain ``torch.save`` file."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import chosen, written_aside
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import ExportError
from hvdrecover.state.trees import rebuild
from hvdrecover.torch.framework import TorchFramework

_SCALARS = {type(None), bool, int, float, complex, str, bytes}
_MAPPINGS = {dict, OrderedDict, Counter}
_SEQUENCES = {list, tuple, set}


def to_torch(
    storage: Storage, commit: CommitId, only: Sequence[str], path: Path, *, force: bool
) -> list[str]:
    """Write attributes to a file that ``torch.load(path, weights_only=True)`` reads; every byte is verified.

    The file holds a dict: attribute name to its ``state_dict``, plain object, or cursor if it is a sampler.

    Args:
        storage: the root.
        commit: which commit.
        only: the attributes; empty for all.
        path: the file to write.
        force: whether to replace the file if it exists.

    Returns:
        The attributes that were exported.

    Raises:
        ExportError: the file exists, an attribute is missing, or one holds an object of a kind that such a
            file can't hold without code, such as a dataclass.
    """
    url = f"{storage.url}/{commit.name}"
    with written_aside(path, force=force) as aside:
        snapshot = read_commit(storage, commit, only or None)
        names = chosen(snapshot, only, url)
        exported = _exported(snapshot, names, url)
        with aside.open("xb") as file:
            torch.save(exported, file)
    return names


def _exported(snapshot: Snapshot, names: Sequence[str], url: str) -> dict[str, Any]:
    cursors, structures = snapshot.samplers, snapshot.attributes
    framework, exported, refused = TorchFramework(), {}, []
    for name in names:
        try:
            value = cursors.get(name)
            if name in structures:
                value = rebuild(framework, structures[name], snapshot.arenas.get(name), own=False)
            _check(value, name)
            exported[name] = value
        except ValueError as error:
            refused.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
    if refused:
        raise ExportError(
            url,
            f"a torch file that is loaded without running code can't hold {'; '.join(refused)}; name other "
            "attributes with --only",
        )
    return exported


def _check(value: Any, path: str) -> None:
    """Raise a ValueError unless a value is of the kinds that ``torch.load(weights_only=True)`` makes."""
    kind = type(value)
    if kind in _MAPPINGS:
        for key, item in value.items():
            _check(key, f"{path} key {key!r}")
            _check(item, f"{path}[{key!r}]")
    elif kind in _SEQUENCES:
        for number, item in enumerate(value):
            _check(item, f"{path}[{number}]")
    elif kind not in _SCALARS and not isinstance(value, torch.Tensor):
        raise ValueError(f"{path}, a {kind.__module__}.{kind.__qualname__}")
