"""The version of the training data. Each durable commit holds it, so that a resumed job notices other data.

A version finds mistakes: another data set, files that are missing, added, cut short or overwritten. It is no
defence against somebody who changes a file and restores its size and modification time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdrecover.checkpoint import redact
from hvdrecover.checkpoint.arena import digest
from hvdrecover.checkpoint.storage import failures, open_filesystem, retried, storage_in
from hvdrecover.errors import ConfigError
from hvdrecover.machine import SYSTEM_CLOCK

FORMAT = 2  # 1 was a fingerprint of the content, which cannot be compared with names, sizes and times
_MOST_JSON = 44_000  # bytes; a manifest holds a longer list of files as its digest only
_MOST_LINES = 5  # files that a message lists of each kind: removed, added, changed

# The fields of a listing that change with a file's content, by preference. A tag or checksum of the store
# comes first: unlike a modification time, it often survives an upload of the same bytes.
_STAMPS = ("md5Hash", "crc32c", "content_md5", "ETag", "etag", "mtime", "LastModified", "last_modified")

FileFacts = tuple[int, str]
"""A file's size in bytes, and its stamp: the store's tag, or the modification time in whole seconds."""


@dataclass(frozen=True)
class DataVersion:
    """The version of the training data: a text of yours, or the names, sizes and times of files.

    Args:
        text: a text that you change whenever the data change, such as a release or a digest.
        files: `FileFacts` by name; only `of_files` gives it.

    Raises:
        ConfigError: the text is empty, or a path.

    Examples:
        >>> version = recover.DataVersion("imagenet-2026-03")
        >>> guard = recover.Guard(data=version, data_changed="warn")  # for the state: TorchState(guard=guard)
    """

    text: str = ""
    files: Mapping[str, FileFacts] = field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or (not self.text and not self.files):
            problem = f"the version must be a text that is not empty, got {self.text!r}"
            raise ConfigError("DataVersion", problem)
        if "/" in self.text or os.path.lexists(self.text):
            raise ConfigError(
                "DataVersion",
                f"'{redact(self.text)}' is a path, and a text never changes; "
                "use DataVersion.of_files(path), or a text that names no file",
            )

    @classmethod
    def of_files(cls, path: str | os.PathLike[str]) -> DataVersion:
        """List the files at a path. No file is read.

        The version consists of each file's name below the path, its size, and its modification time in whole
        seconds; or the checksum or ETag, if the store lists one. A folder may be moved. Links on a local disk
        are followed. Modification times also change if the same bytes are written again, as by ``cp`` without
        ``-p`` or a new download. If copies on several hosts have other times, pass a text instead.

        Args:
            path: path or fsspec URL of a folder or of one file.

        Raises:
            ConfigError: there are no files at the path.
            StorageError: the storage failed five times.

        Examples:
            >>> version = recover.DataVersion.of_files("s3://bucket/train")  # doctest: +SKIP
        """
        url = os.fspath(path)
        filesystem, root = open_filesystem(url, "data")
        local = "file" in filesystem.protocol
        shown = root if local else redact(url)

        def attempt() -> dict[str, FileFacts]:
            with failures(shown, "", "list the training data"):
                found = _local(Path(root)) if local else _remote(filesystem, root.rstrip("/"), shown)
                return dict(sorted(found))

        files = retried(SYSTEM_CLOCK, attempt)
        if not files:  # most often, nothing is mounted there
            problem = f"there are no files at '{shown}'; check the path, and that it is mounted on this host"
            raise ConfigError("data", problem)
        return cls(files=files)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON for a manifest: at most 64 KB, however many files there are."""
        if self.text:
            return {"version": FORMAT, "text": self.text}
        files = {name: list(facts) for name, facts in self.files.items()}
        listed = json.dumps(files)
        summary = {
            "version": FORMAT,
            "count": len(files),
            "bytes": sum(size for size, _ in self.files.values()),
            "digest": digest(listed.encode()),
        }
        return {**summary, "files": files} if len(listed) <= _MOST_JSON else summary


def differences(stored: Mapping[str, Any], present: DataVersion) -> list[str]:
    """Return a line for each change of the data since a commit, which ``stored`` (`as_json`) at that time."""
    if (found := stored.get("version")) != FORMAT:
        raise ConfigError(
            "data", f"the commit's data version has format {found!r}, this hvdrecover knows {FORMAT}; upgrade"
        )
    now = present.as_json()
    if stored == now:
        return []
    lines = _file_differences(stored["files"], now["files"]) if "files" in stored and "files" in now else []
    return lines or [f"the data version was {_shown(stored)}, and is {_shown(now)}"]


def _shown(version: Mapping[str, Any]) -> str:
    if "text" in version:
        return f"'{version['text']}'"
    return f"{version['count']} files of {version['bytes']} bytes (digest {version['digest'][:8]})"


def _file_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    def change(name: str) -> str:
        before, now = (f"{size} bytes of {stamp}" for size, stamp in (old[name], new[name]))
        return f"{name} (was {before}, is {now})"

    found = {
        "removed": [name for name in old if name not in new],
        "added": [name for name in new if name not in old],
        "changed": [change(name) for name in old if name in new and list(old[name]) != list(new[name])],
    }
    lines = []
    for what, names in found.items():
        lines += [f"{what}: {name}" for name in names[:_MOST_LINES]]
        lines += [f"{what}: {len(names) - _MOST_LINES} more"] if len(names) > _MOST_LINES else []
    return lines


def _local(root: Path) -> Iterator[tuple[str, FileFacts]]:
    def fail(error: OSError) -> None:
        raise error

    if not root.exists():
        return
    if not root.is_dir():
        yield root.name, (root.stat().st_size, _stamp(root.stat().st_mtime))
        return
    seen = {root.resolve()}
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=fail):
        below = {name: (Path(folder) / name).resolve() for name in sorted(subfolders)}
        # A link to a folder above would never end.
        subfolders[:] = [name for name, target in below.items() if target not in seen]
        seen.update(below.values())
        for name in names:
            file = Path(folder) / name
            status = file.stat()
            name = _printable(file.relative_to(root).as_posix())
            yield name, (status.st_size, _stamp(status.st_mtime))


def _remote(filesystem: Any, root: str, shown: str) -> Iterator[tuple[str, FileFacts]]:
    is_file = storage_in(filesystem, root, shown).size("") is not None  # also mends a lost SFTP connection
    filesystem.invalidate_cache()
    # By default, fsspec's walk skips folders that it cannot list. Its asynchronous file systems always raise.
    options = {} if filesystem.async_impl else {"on_error": "raise"}
    try:
        found = {root: filesystem.info(root)} if is_file else filesystem.find(root, detail=True, **options)
    except FileNotFoundError:
        return
    for name, info in found.items():
        if info["type"] != "directory" and not name.endswith("/"):
            relative = name.removeprefix(root).strip("/") or name.rpartition("/")[2]
            stamp = next((_stamp(info[field]) for field in _STAMPS if info.get(field)), "")
            yield _printable(relative), (int(info["size"] or 0), stamp)


def _stamp(value: Any) -> str:
    """Return a tag as it is, and a time in whole seconds: archives and many file systems keep no more."""
    if isinstance(value, int | float):
        value = datetime.fromtimestamp(value, UTC)
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(value).strip('"')


def _printable(name: str) -> str:
    """Return a name that JSON can hold, also if the file's name is not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
