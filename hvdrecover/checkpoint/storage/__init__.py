"""Storages: where the bytes of durable commits lie, over any fsspec file system."""

from __future__ import annotations

from pathlib import Path

import fsspec

from hvdrecover.checkpoint.storage.failures import failures, redact
from hvdrecover.checkpoint.storage.interface import ReadBytes, Storage
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.storage.remote import RemoteStorage
from hvdrecover.errors import ConfigError

__all__ = ["LocalStorage", "ReadBytes", "RemoteStorage", "Storage", "open_storage", "redact"]


def open_storage(url: str) -> Storage:
    """The storage behind a path or an fsspec URL. Nothing is read or written yet.

    Raises:
        ConfigError: no file system is known for the URL, or a package that it needs is not installed.
        StorageError: a server that has to be connected to can't be reached.
    """
    shown = redact(url)
    with failures(shown, "", "open the storage"):
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError("checkpoint", f"'{shown}' can't be opened: {redact(str(error))}") from error
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)
    if "file" in protocols:
        return LocalStorage(Path(path).absolute())
    return RemoteStorage(filesystem, path.rstrip("/"), shown.rstrip("/"))
