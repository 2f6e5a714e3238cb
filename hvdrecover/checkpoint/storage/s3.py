"""A checkpoint root in an S3 bucket, or in one of another store that speaks S3's language, over s3fs.

Large files are uploaded in parts, several at a time. The file appears, whole, with the last request of its
upload.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import Digest, digest
from hvdrecover.checkpoint.storage.failures import failures
from hvdrecover.checkpoint.storage.interface import TEMPORARY, Temporary
from hvdrecover.checkpoint.storage.pieces import transferred
from hvdrecover.checkpoint.storage.remote import AT_ONCE, PIECE, RemoteStorage

_MOST_PARTS = 10_000  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_MIB = 1 << 20  # bytes
_PATIENCE = 60.0  # seconds
_SLOWEST = 1 << 18  # bytes per second; a link that is slower is taken to be dead


class Place(NamedTuple):
    """The place of an object."""

    bucket: str
    key: str


def part_size(nbytes: int, least: int = PIECE) -> int:
    """Return how large the parts of an upload are, so that no more are needed than an object may have.

    Args:
        nbytes: the size of the file.
        least: what to return at least; S3 takes nothing below 5 MiB.

    Returns:
        The size of every part but the last: ``least``, or some whole MiB.
    """
    return max(least, -(-nbytes // (_MOST_PARTS * _MIB)) * _MIB)


class S3Storage(RemoteStorage):
    """A prefix of an S3 bucket, which must exist. A file that has been put is whole and durable.

    A piece, as a part of an upload, must have 5 MiB at least.
    """

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file that is durable on return, and is there either whole or not at all."""
        with failures(self.url, path, "write the file"):
            size = part_size(len(buffer), self._piece)
            if len(buffer) > size:
                return self._upload(self._place(path), buffer, size)
            self._fs.pipe_file(self._path(path), buffer.tobytes(), timeout=_limit(len(buffer)))
            return digest(buffer)

    def _upload(self, place: Place, buffer: Bytes, size: int) -> str:
        """Upload a file in parts of ``size`` bytes; return its digest."""
        upload: dict[str, Any] = {"Bucket": place.bucket, "Key": place.key}
        upload["UploadId"] = self._fs.call_s3("create_multipart_upload", **upload)["UploadId"]

        def send(piece: Bytes, start: int) -> str:
            part = {"PartNumber": start // size + 1, "timeout": _limit(size * AT_ONCE)}
            tag: str = self._fs.call_s3("upload_part", **upload, **part, Body=piece.tobytes())["ETag"]
            return tag

        content, tags = Digest(), list[str]()
        try:
            for piece, tag in transferred(buffer, size, AT_ONCE, send):
                content.update(piece)
                tags.append(tag)
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
            self._fs.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
        except BaseException:
            with suppress(Exception):  # the store may be away; the next job aborts the upload
                self._abort(upload)
            raise
        return content.hex()

    def _abort(self, upload: dict[str, Any]) -> None:
        with suppress(FileNotFoundError):
            self._fs.call_s3("abort_multipart_upload", **upload)

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""
        with failures(self.url, folder, "delete the folder"):
            self._fs.invalidate_cache()
            # One by one, because s3fs keeps to itself which files of many could not be deleted.
            paths = self._fs.find(self._path(folder))
            for path in paths:
                self._fs.rm_file(path)
            self._delete_folders(paths, self._path(folder))

    def _delete_folders(self, paths: list[str], top: str) -> None:
        """Delete the folders themselves, which SeaweedFS has and shows; on S3 that does nothing."""
        folders = {top}
        for path in paths:
            while len(path := path.rpartition("/")[0]) > len(top):
                folders.add(path)
        for folder in sorted(folders, key=len, reverse=True):
            bucket, key, _ = self._fs.split_path(folder)
            self._fs.call_s3("delete_object", Bucket=bucket, Key=f"{key}/")

    def temporaries(self) -> list[Temporary]:
        """The unfinished uploads: their parts can't be seen, but are paid for."""
        with failures(self.url, "", "look for unfinished uploads"):
            return [
                Temporary(self._below(upload), self._below(upload).split("/")[0], self._size_of_parts(upload))
                for upload in self._unfinished()
            ]

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Abort the uploads that killed processes left."""
        with failures(self.url, "", "look for unfinished uploads"):
            for upload in self._unfinished():
                if stale(self._below(upload).split("/")[0]):
                    self._abort(upload)

    def _make_folder(self, folder: str) -> None:
        """Do nothing: prefixes need not be made, and a bucket is not made because of a misspelt name."""

    def _unfinished(self) -> list[dict[str, str]]:
        """The unfinished uploads of this root; below it may be other roots, and files of others."""
        root = self._place("")
        asked = {"Bucket": root.bucket, "Prefix": f"{root.key}/" if root.key else ""}
        found: list[dict[str, str]] = []
        marker: dict[str, str] = {}
        while True:
            answer = self._fs.call_s3("list_multipart_uploads", **asked, **marker)
            found += [
                {"Bucket": root.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                for upload in answer.get("Uploads", ())
                if self._is_ours(upload)
            ]
            if not answer.get("IsTruncated"):
                return found
            marker = {
                "KeyMarker": answer["NextKeyMarker"],
                "UploadIdMarker": answer["NextUploadIdMarker"],
            }

    def _is_ours(self, upload: dict[str, str]) -> bool:
        folder, _, file = self._below(upload).partition("/")
        ours = CommitId.parse(folder) is not None or folder.startswith(TEMPORARY)
        return ours and "/" not in file

    def _below(self, upload: dict[str, str]) -> str:
        """An upload's path below the root."""
        return upload["Key"].removeprefix(self._place("").key).strip("/")

    def _size_of_parts(self, upload: dict[str, str]) -> int:
        size, marker = 0, 0
        while True:
            try:
                answer = self._fs.call_s3("list_parts", **upload, PartNumberMarker=marker)
            except FileNotFoundError:  # it has come to its end
                return size
            size += sum(int(part["Size"]) for part in answer.get("Parts", ()))
            if not answer.get("IsTruncated"):
                return size
            marker = answer["NextPartNumberMarker"]

    def _place(self, path: str) -> Place:
        bucket, key, _ = self._fs.split_path(self._path(path))
        return Place(bucket, key)


def _limit(nbytes: int) -> float:
    """For how long to wait until so many bytes are through, in seconds."""
    return _PATIENCE + nbytes / _SLOWEST
