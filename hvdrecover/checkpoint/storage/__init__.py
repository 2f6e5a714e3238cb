"""Storages: the places of durable commits, on a local disk or any fsspec file system."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from hvdrecover.checkpoint.storage.interface import Storage, failures
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.storage.remote import RemoteStorage, S3Storage
from hvdrecover.errors import ConfigError
from hvdrecover.redaction import redact

__all__ = ["LocalStorage", "RemoteStorage", "Storage", "open_filesystem", "open_storage", "storage_in"]

_SFTP = {"sftp", "ssh"}


def open_storage(url: str) -> Storage:
    """Open the storage of a path or an fsspec URL; nothing is read or written, SFTP does not connect yet.

    Raises:
        ConfigError: the URL's file system is unknown, or a package that it needs is missing.
        StorageError: the file system connects when it is made, and the server cannot be reached.
    """
    return storage_in(*open_filesystem(url, "checkpoint"), redact(url))


def open_filesystem(url: str, name: str) -> tuple[Any, str]:
    """Return fsspec's file system for a path or a URL, and the path in it. Raises as `open_storage` does.

    Args:
        name: the user's name for the URL in errors: an option or an argument.
    """
    shown = redact(url)
    with failures(shown, "", "open the storage"):
        try:
            return _opened(url)
        except (ValueError, ImportError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(name, f"'{shown}' can't be opened: {redact(str(error))}") from error


def storage_in(filesystem: Any, path: str, shown: str) -> Storage:
    """Return the storage of a folder in an fsspec file system.

    Args:
        path: the folder's path in it.
        shown: the folder's URL as messages show it, without credentials.
    """
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else {*filesystem.protocol}
    if "file" in protocols:
        return LocalStorage(Path(path).absolute())
    kind = S3Storage if "s3" in protocols else RemoteStorage
    if protocols & _SFTP:
        kind = import_module("hvdrecover.checkpoint.storage.sftp").SftpStorage  # needs paramiko
    return kind(filesystem, path.rstrip("/"), shown.rstrip("/"))


def _opened(url: str) -> tuple[Any, str]:
    protocols = [part.partition("://")[0] for part in url.split("::")]
    is_url = "://" in url.partition("::")[0] or protocols[0] in known_implementations
    if protocols[0] in LocalFileSystem.protocol or not is_url:
        # `url_to_fs` would take a '::' in a path for the start of another URL.
        return fsspec.filesystem("file"), LocalFileSystem._strip_protocol(url)
    if not _SFTP.intersection(protocols):
        # Other processes change the root, too.
        options = {"use_listings_cache": False} if protocols[0] in ("s3", "s3a") else {}
        return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
    if len(protocols) > 1:  # there, host keys would not be checked
        raise ConfigError(redact(url), "an SFTP server can't be reached through another file system")
    try:
        from hvdrecover.checkpoint.storage.sftp import StrictSftpFileSystem as Sftp
    except ImportError as error:
        raise ImportError(f"SFTP needs paramiko: pip install 'hvdrecover[sftp]' ({error})") from error
    return Sftp(**Sftp._get_kwargs_from_urls(url)), Sftp._strip_protocol(url)
