"""The contents of one commit, without reading its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import catalog
from hvdrecover.checkpoint.inspection.catalog import Entry
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import FileEntry, Manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import CorruptCheckpointError


@dataclass(frozen=True)
class Contents:
    """The contents of one commit.

    Attributes:
        entry: its line in the catalogue.
        manifest: its manifest.
        layouts: file name to the tensors in it.
        attributes: the structure of each attribute but the samplers; see the function `attributes`.
        samplers: the cursor of each sampler, by attribute name.
    """

    entry: Entry
    manifest: Manifest
    layouts: dict[str, Layout]
    attributes: dict[str, Json]
    samplers: dict[str, Json]


def look_into(storage: Storage, commit: CommitId) -> Contents:
    """Read a commit's manifest and the headers of its files; no digest of a file is checked.

    Raises:
        CorruptCheckpointError: the manifest, a file's size or a header is wrong.
        FormatVersionError: it is of a newer format.
        StorageError: the storage failed.
    """
    manifest, url = root.read_manifest(storage, commit), f"{storage.url}/{commit.name}"
    entry = catalog.entry(storage, commit)
    if entry is None:
        raise CorruptCheckpointError(url, "it has just been deleted")
    return Contents(
        entry=entry,
        manifest=manifest,
        layouts={file.name: layout_of(storage, commit, file) for file in manifest.files},
        attributes=attributes(manifest.state, url),
        samplers=samplers(manifest.state, url),
    )


def attributes(state: Mapping[str, Json], url: str) -> dict[str, Json]:
    """The structure of each attribute but the samplers: containers, plain values, names of tensors.

    Args:
        state: `hvdrecover.checkpoint.manifest.Manifest.state`.
        url: what to call the commit in an error.

    Raises:
        CorruptCheckpointError: it is nonsense.
    """
    return _part(state, "attributes", url)


def samplers(state: Mapping[str, Json], url: str) -> dict[str, Json]:
    """The cursor of each sampler, by attribute name.

    Raises:
        CorruptCheckpointError: it is nonsense.
    """
    return _part(state, "samplers", url)


def _part(state: Mapping[str, Json], name: str, url: str) -> dict[str, Json]:
    part = state.get(name, {})
    if not isinstance(part, dict):
        raise CorruptCheckpointError(url, f"the {name} in its manifest are not a JSON object")
    return part


def layout_of(storage: Storage, commit: CommitId, entry: FileEntry) -> Layout:
    """Read a data file's header only; its digest is not checked.

    Raises:
        CorruptCheckpointError: the file is missing, has another size, or its header is nonsense.
        StorageError: the storage failed.
    """
    path = f"{commit.name}/{entry.name}"
    url = f"{storage.url}/{path}"
    root.check_size(storage, commit, entry)
    try:
        return root.read_layout(storage, path, entry.size)
    except ValueError as error:
        raise CorruptCheckpointError(url, str(error)) from error
