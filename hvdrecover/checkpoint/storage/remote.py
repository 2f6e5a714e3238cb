"""A checkpoint root on any fsspec file system, such as Google Cloud Storage or Azure; and on S3.

On S3, a large file is uploaded in parts, several at a time, and appears with the last request. The parts of a
killed process stay in the bucket, invisible and paid for, until the upload is aborted.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.storage import TEMPORARY, Storage, Temporary, failures, transferred
from hvdrecover.errors import ConfigError

AT_ONCE = 8  # pieces under way; one connection to an object store is too slow for a fast link
_EXISTS = (errno.EEXIST, errno.EINVAL)  # s3fs raises the latter for a condition that does not hold
_MOST_PARTS = 10_000  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_PATIENCE = 60.0  # seconds
_SLOWEST = 1 << 18  # bytes per second; a slower link is assumed to be dead


class RemoteStorage(Storage):
    """A folder of an fsspec file system. A file that has been closed is assumed to be durable."""

    piece = 1 << 24  # bytes of a large file that are transferred at a time

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._fs = filesystem
        self._root = root
        self.url = url

    def check(self) -> None:
        """Create a file twice: some storages ignore the condition, others do not know it."""
        probe = f"{TEMPORARY}{uuid.uuid4().hex}"
        with failures(self.url, "", "check that the storage creates a file only once"):
            self._make_folder(self._root)
            try:
                self._fs.pipe_file(self._path(probe), b"1", mode="create")
                try:
                    self._fs.pipe_file(self._path(probe), b"2", mode="create")
                except OSError as error:
                    if isinstance(error, FileExistsError) or error.errno in _EXISTS:
                        return
                    raise
            finally:
                self.remove(probe)
        raise ConfigError(
            self.url,
            "this storage creates a file that exists (it ignores If-None-Match, or knows no such condition), "
            "so two jobs could write to one root. Name a root on a storage with conditional writes.",
        )

    def _names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()  # other processes change the root, too
        try:
            found = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        # An object store may list the folder among its content; others list a file as its own content.
        paths = {name.strip("/") for name in found} - {self._path(folder).strip("/")}
        return [path.rsplit("/", 1)[-1] for path in paths]

    def _size(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def _read(self, path: str) -> bytes:
        return self._fs.cat_file(self._path(path))  # type: ignore[no-any-return]

    def _read_pieces(self, path: str, buffer: Bytes, start: int) -> Iterator[tuple[Bytes, int]]:
        nbytes = self._size(path)
        if nbytes is None:
            raise FileNotFoundError(f"there is no file '{path}'")

        def get(piece: Bytes, at: int) -> int:
            data = self._fs.cat_file(self._path(path), start=start + at, end=start + at + len(piece))
            piece[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            return len(data)

        # Only asynchronous file systems can be used by several threads at a time.
        at_once = AT_ONCE if self._fs.async_impl else 1
        yield from transferred(buffer[: max(nbytes - start, 0)], self.piece, at_once, get)

    def _write_pieces(self, path: str, buffer: Bytes) -> Iterator[Bytes]:
        target = self._path(path)
        self._make_folder(target.rpartition("/")[0])
        with self._fs.open(target, "wb") as file:
            for start in range(0, len(buffer), self.piece):
                piece = buffer[start : start + self.piece]
                if file.write(piece.data) not in (len(piece), None):  # some return None
                    raise OSError(errno.EIO, "the storage accepts no more bytes")
                yield piece

    def _publish(self, path: str, data: bytes, *, exclusive: bool) -> bool:
        target = self._path(path)
        self._make_folder(target.rpartition("/")[0])
        try:
            self._fs.pipe_file(target, data, **({"mode": "create"} if exclusive else {}))
        except OSError:
            if not exclusive or self._size(path) is None:  # storages differ in the error for an existing file
                raise
            return False
        return True

    def _remove(self, path: str) -> None:
        self._fs.rm_file(self._path(path))

    def _delete(self, folder: str) -> None:
        self._fs.invalidate_cache()
        self._fs.rm(self._path(folder), recursive=True)

    def _temporaries(self) -> list[Temporary]:
        return []  # a file appears with its last request

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _make_folder(self, folder: str) -> None:
        self._fs.makedirs(folder, exist_ok=True)


class S3Storage(RemoteStorage):
    """A prefix of an S3 bucket, which must exist. `piece` is the size of parts, at least 5 MiB."""

    def _write_pieces(self, path: str, buffer: Bytes) -> Iterator[Bytes]:
        part = max(self.piece, -(-len(buffer) // _MOST_PARTS))
        # s3fs uploads a file of at least two parts in parts; a smaller one must be bytes.
        data = _Slices(buffer) if len(buffer) >= 2 * part else buffer.tobytes()
        timeout = _PATIENCE + len(buffer) / _SLOWEST  # s3fs limits the time of reads only
        self._fs.pipe_file(self._path(path), data, chunksize=part, timeout=timeout)
        yield buffer

    def _delete(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            super()._delete(folder)
        # SeaweedFS has folders, and lists them when they are empty. On S3 this does nothing.
        bucket, key, _ = self._fs.split_path(self._path(folder))
        self._fs.call_s3("delete_object", Bucket=bucket, Key=f"{key}/")

    def _temporaries(self) -> list[Temporary]:
        """Return the unfinished uploads of this root, up to 1000; not those of roots below it."""
        bucket, key, _ = self._fs.split_path(self._root)
        prefix = f"{key}/" if key else ""
        answer = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        found = []
        for each in answer.get("Uploads", ()):
            path = each["Key"].removeprefix(prefix)
            folder = path.rpartition("/")[0]
            if CommitId.parse(folder) is not None:
                upload = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
                with suppress(FileNotFoundError):  # the upload has just ended
                    parts = self._fs.call_s3("list_parts", **upload).get("Parts", ())
                    found.append(Temporary(path, folder, sum(int(each["Size"]) for each in parts), upload))
        return found

    def _discard(self, temporary: Temporary) -> None:
        self._fs.call_s3("abort_multipart_upload", **temporary.handle)

    def _make_folder(self, folder: str) -> None:
        pass  # prefixes are not made, and no bucket is made because of a misspelt name


class _Slices:
    """A buffer whose slices are bytes: the client accepts only these, and a whole copy doubles the memory."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer

    def __len__(self) -> int:
        return len(self._buffer)

    def __getitem__(self, part: slice) -> bytes:
        return self._buffer[part].tobytes()
