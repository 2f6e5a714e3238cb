"""A checkpoint root in an S3 bucket, or in another store with S3's protocol, by s3fs.

A large file is uploaded in parts, several at a time, and appears with the last request. The parts of a killed
process stay in the bucket, invisible and paid for, until the upload is aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import digest
from hvdrecover.checkpoint.storage.interface import Temporary, failures
from hvdrecover.checkpoint.storage.remote import RemoteStorage

_MOST_PARTS = 10_000  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_PATIENCE = 60.0  # seconds
_SLOWEST = 1 << 18  # bytes per second; a slower link is assumed to be dead


class S3Storage(RemoteStorage):
    """A prefix of an S3 bucket, which must exist. `piece` is the size of parts, at least 5 MiB."""

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file and return its digest; readers see all of it or nothing."""
        with failures(self.url, path, "write the file"):
            part = max(self._piece, -(-len(buffer) // _MOST_PARTS))
            # s3fs uploads a file of at least two parts in parts; a smaller one must be bytes.
            data = _Slices(buffer) if len(buffer) >= 2 * part else buffer.tobytes()
            timeout = _PATIENCE + len(buffer) / _SLOWEST  # s3fs limits the time of reads only
            self._fs.pipe_file(self._path(path), data, chunksize=part, timeout=timeout)
            return digest(buffer)

    def delete(self, folder: str) -> None:
        """Delete a folder with its content, if it exists."""
        super().delete(folder)
        with failures(self.url, folder, "delete the folder"):
            # SeaweedFS has folders, and lists them when they are empty. On S3 this does nothing.
            bucket, key, _ = self._fs.split_path(self._path(folder))
            self._fs.call_s3("delete_object", Bucket=bucket, Key=f"{key}/")

    def temporaries(self) -> list[Temporary]:
        """Return the unfinished uploads, up to 1000 of them and of the parts of each."""
        with failures(self.url, "", "look for unfinished uploads"):
            found = []
            for path, upload in self._unfinished():
                with suppress(FileNotFoundError):  # the upload has just ended
                    parts = self._fs.call_s3("list_parts", **upload).get("Parts", ())
                    nbytes = sum(int(part["Size"]) for part in parts)
                    found.append(Temporary(path, path.partition("/")[0], nbytes))
            return found

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Abort the uploads that killed processes left."""
        with failures(self.url, "", "abort unfinished uploads"):
            for path, upload in self._unfinished():
                if stale(path.partition("/")[0]):
                    with suppress(FileNotFoundError):
                        self._fs.call_s3("abort_multipart_upload", **upload)

    def _unfinished(self) -> list[tuple[str, dict[str, Any]]]:
        """Return path and identity of the unfinished uploads of this root, not of roots below it."""
        bucket, key, _ = self._fs.split_path(self._root)
        prefix = f"{key}/" if key else ""
        answer = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        found = []
        for upload in answer.get("Uploads", ()):
            path = upload["Key"].removeprefix(prefix)
            if CommitId.parse(path.rpartition("/")[0]) is not None:
                identity = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                found.append((path, identity))
        return found

    def _make_folder(self, folder: str) -> None:
        """Do nothing: prefixes are not made, and no bucket is made because of a misspelt name."""


class _Slices:
    """A buffer whose slices are bytes: the client accepts only these, and a whole copy doubles the memory."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer

    def __len__(self) -> int:
        return len(self._buffer)

    def __getitem__(self, part: slice) -> bytes:
        return self._buffer[part].tobytes()
