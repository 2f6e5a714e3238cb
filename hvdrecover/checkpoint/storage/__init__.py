"""Storages: where the bytes of durable commits lie, over any fsspec file system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from hvdrecover.checkpoint.storage.failures import failures, is_full
from hvdrecover.checkpoint.storage.interface import ReadBytes, Storage, Temporary
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.storage.remote import RemoteStorage
from hvdrecover.checkpoint.storage.s3 import S3Storage
from hvdrecover.errors import ConfigError
from hvdrecover.redaction import redact

# Without these, paramiko waits for up to an hour, or for as long as TCP does. s3fs has timeouts of its own.
_SFTP_WAITS = ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
_SFTP_TIMEOUT = 30.0  # seconds
_SFTP = {"sftp", "ssh"}

__all__ = [
    "LocalStorage",
    "ReadBytes",
    "RemoteStorage",
    "Storage",
    "Temporary",
    "is_full",
    "open_filesystem",
    "open_storage",
    "storage_in",
]


def open_storage(url: str) -> Storage:
    """The storage behind a path or an fsspec URL. Nothing is read or written yet; SFTP is not connected to.

    Raises:
        ConfigError: no file system is known for the URL, or a package that it needs is not installed.
        StorageError: the file system connects when it is made, and its server can't be reached.
    """
    return storage_in(*open_filesystem(url, "checkpoint"), redact(url))


def open_filesystem(url: str, name: str) -> tuple[Any, str]:
    """fsspec's file system for a path or a URL, and the path in it.

    Args:
        url: the path or URL.
        name: the option or argument that it was given as.

    Raises:
        ConfigError: no file system is known for the URL, or a package that it needs is not installed.
        StorageError: the file system connects when it is made, and its server can't be reached.
    """
    shown = redact(url)
    with failures(shown, "", "open the storage"):
        try:
            filesystem, path = _opened(url)
        except ConfigError:
            raise
        except (ValueError, ImportError) as error:
            raise ConfigError(name, f"'{shown}' can't be opened: {redact(str(error))}") from error
    return filesystem, path


def storage_in(filesystem: Any, path: str, shown: str) -> Storage:
    """The storage of a folder in one of fsspec's file systems.

    Args:
        filesystem: the file system, from `open_filesystem`.
        path: the folder's path in it.
        shown: the folder's URL as messages show it, without credentials.
    """
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)
    if "file" in protocols:
        return LocalStorage(Path(path).absolute())
    if "s3" in protocols:
        return S3Storage(filesystem, path.rstrip("/"), shown.rstrip("/"))
    if "sftp" in protocols:
        from hvdrecover.checkpoint.storage.sftp import SftpStorage  # needs a package that others do without

        return SftpStorage(filesystem, path.rstrip("/"), shown.rstrip("/"))
    return RemoteStorage(filesystem, path.rstrip("/"), shown.rstrip("/"))


def _opened(url: str) -> tuple[Any, str]:
    protocol, separator, _ = url.partition("://")
    chained = url.partition("::")[0] in known_implementations
    if protocol in LocalFileSystem.protocol or not (separator or chained):
        # To `url_to_fs`, a '::' in the path would begin another URL.
        return fsspec.filesystem("file"), LocalFileSystem._strip_protocol(url)
    if _is_sftp(url):
        return _sftp(url)
    # Other processes change the root, too.
    options = {"use_listings_cache": False} if protocol in ("s3", "s3a") else {}
    opened: tuple[Any, str] = fsspec.core.url_to_fs(url, **options)
    return opened


def _is_sftp(url: str) -> bool:
    """Return whether a URL is one of SFTP's.

    Raises:
        ConfigError: it is one inside another one, where host keys would not be checked.
    """
    protocols = [part.split("://", 1)[0] for part in url.split("::")]
    if len(protocols) > 1 and not set(protocols).isdisjoint(_SFTP):
        raise ConfigError(redact(url), "an SFTP server can't be reached through another file system")
    return "://" in url and protocols[0] in _SFTP


def _sftp(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL of SFTP's, with the server's host key checked."""
    try:
        from hvdrecover.checkpoint.storage.known_hosts import KnownHostsFileSystem
    except ImportError as error:
        raise ImportError(f"SFTP needs paramiko: pip install 'hvdrecover[sftp]' ({error})") from error
    told = {**fsspec.config.conf.get("sftp", {}), **fsspec.config.conf.get("ssh", {})}
    waits: dict[str, Any] = {name: _SFTP_TIMEOUT for name in _SFTP_WAITS if name not in told}
    named = KnownHostsFileSystem._get_kwargs_from_urls(url)
    return KnownHostsFileSystem(**named, **waits), KnownHostsFileSystem._strip_protocol(url)
