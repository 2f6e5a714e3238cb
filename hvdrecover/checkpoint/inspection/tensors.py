"""The tensors of a commit: their names, dtypes and shapes, without reading them."""

from __future__ import annotations

from hvdrecover.checkpoint import layout
from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import FileEntry
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import CorruptCheckpointError


def layout_of(storage: Storage, commit: CommitId, entry: FileEntry) -> Layout:
    """Read a data file's header only; its digest is not checked.

    Raises:
        CorruptCheckpointError: the file is missing, has another size, or its header is nonsense.
        StorageError: the storage failed.
    """
    path = f"{commit.name}/{entry.name}"
    url = f"{storage.url}/{path}"
    size = storage.size(path)
    if size is None:
        raise CorruptCheckpointError(url, "the file is missing")
    if size != entry.size:
        raise CorruptCheckpointError(url, f"the file has {size} bytes, and the manifest says {entry.size}")
    try:
        start = layout.header_size(_head(storage, path, min(8, size)), size)
        return layout.parse(_head(storage, path, start), size)
    except ValueError as error:
        raise CorruptCheckpointError(url, str(error)) from error


def _head(storage: Storage, path: str, count: int) -> bytes:
    buffer = allocate(count)
    return buffer[: storage.read_into(path, buffer).size].tobytes()
