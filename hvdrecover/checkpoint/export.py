"""Tensors of a commit as one safetensors file of the user's."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hvdrecover.checkpoint import layout
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.comparison import only_tensors
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.manifest import HasState
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.root import read_layout, read_manifest
from hvdrecover.checkpoint.storage.interface import Storage, failures
from hvdrecover.errors import ExportError


def to_safetensors(
    storage: Storage, commit: CommitId, only: Sequence[str], path: Path, *, force: bool
) -> list[str]:
    """Write the tensors of some attributes, or all, to a file, verified; returns the attributes.

    If one attribute is exported, its tensors keep their names, for a model the keys of its ``state_dict``. If
    several are exported, the attribute's name becomes a prefix, as in ``model.layer.weight``. Memory holds
    one attribute at a time.
    """
    manifest, url = read_manifest(storage, commit), f"{storage.url}/{commit.name}"
    names = chosen(manifest, only, url)
    pure = [name for name, value in manifest.attributes.items() if only_tensors(value)]
    if others := [name for name in names if name not in pure]:
        remedy = f"name one that does with --only ({', '.join(pure)})" if pure else "none of this commit does"
        raise ExportError(
            url,
            f"a safetensors file can hold tensors and nothing else, and so can't hold {', '.join(others)}; "
            f"export to a .pt file, or {remedy}",
        )
    sources: dict[str, dict[str, TensorSpec]] = {}  # by attribute and name: the tensor in the new file
    for name in names:
        prefix = f"{name}." if len(names) > 1 else ""
        specs = read_layout(storage, commit, manifest.by_attribute[name]).specs
        sources[name] = {spec.name: replace(spec, name=prefix + spec.name) for spec in specs}
    planned = layout.plan([spec for named in sources.values() for spec in named.values()])
    with written_aside(path, force=force) as aside, aside.open("xb") as file:
        file.truncate(planned.nbytes)
        file.write(planned.header)
        for attribute, named in sources.items():
            arena = read_commit(storage, commit, {attribute}).arenas[attribute]
            for name, spec in named.items():
                file.seek(planned.offsets[spec.name])
                file.write(arena.bytes_of(name).data)
    return names


def chosen(commit: HasState, only: Sequence[str], url: str) -> list[str]:
    """Return the attributes that a user names, in the order of the commit; all, if none is named."""
    there = [*commit.attributes, *commit.samplers]
    for name in only:
        if name not in there:
            raise ExportError(url, f"the commit has no attribute '{name}'; it has {', '.join(there)}")
    return [name for name in there if not only or name in only]


@contextmanager
def written_aside(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path beside a file; at the end, fsync it and rename it to the file."""
    if path.exists() and not force:
        raise ExportError(str(path), "the file exists; name another one, or pass --force to replace it")
    aside = path.with_name(f".hvdrecover-{uuid.uuid4().hex}{path.suffix}")
    with failures(str(path), "", "write the file"):
        try:
            yield aside
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
