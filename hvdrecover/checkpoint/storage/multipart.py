"""Uploads to S3 in parts, several at a time; a part that the store has already is copied there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.digest import Digest, digest
from hvdrecover.checkpoint.storage.pieces import transferred
from hvdrecover.checkpoint.storage.uploads import Part, Place, Uploaded, Uploads

logger = logging.getLogger(__name__)

_GONE = {"NoSuchKey", "NoSuchVersion", "PreconditionFailed", "404", "412"}


class _Done(NamedTuple):
    """A part of an upload that is under way.

    Attributes:
        part: the part.
        tag: the ETag that the store has given it in this upload.
        copied: whether the store had its bytes already.
    """

    part: Part
    tag: str
    copied: bool

    @property
    def is_doubtful(self) -> bool:
        """Return whether the store's digest of a copy is another one than that of what was sent."""
        return self.copied and self.tag.strip('"') != self.part.tag.strip('"')


class Uploader:
    """Uploads files in parts; an error leaves nothing of one.

    Parts whose bytes are those of an earlier file are copied from there, as long as the store does that well.
    Their digest in the store is compared with that of what was sent. Where it differs by its nature (by
    encryption, or by how the store cuts files up), one such part is read back before the store is believed.

    Args:
        filesystem: s3fs's.
        at_once: how many parts are under way at a time.
        limit: how long to wait for so many bytes, in seconds.
    """

    def __init__(self, filesystem: Any, at_once: int, limit: Callable[[int], float]) -> None:
        self._fs = filesystem
        self._at_once = at_once
        self._limit = limit
        self._uploads = Uploads()
        self._copies = True  # whether the store does, as far as is known
        self._has_proved = False  # that a copy with another digest is right

    def upload(self, place: Place, buffer: Bytes, size: int) -> str:
        """Put a file into the store: whole, or not at all.

        Args:
            place: where to.
            buffer: its content.
            size: bytes of each part but the last.

        Returns:
            The digest of ``buffer``.
        """
        source = self._uploads.source(place) if self._copies else None
        content, file, doubtful = self._attempt(place, buffer, size, source)
        if doubtful is not None and not self._is_right(place, buffer, doubtful * size, size):
            self._give_up_copying(place, "a part that it had copied was another one")
            content, file, _ = self._attempt(place, buffer, size, None)
        self._uploads.add(file)
        return content

    def abort(self, upload: dict[str, Any]) -> None:
        """Delete the parts of an upload that has not come to its end."""
        with suppress(FileNotFoundError):
            self._fs.call_s3("abort_multipart_upload", **upload)

    def _attempt(
        self, place: Place, buffer: Bytes, size: int, source: Uploaded | None
    ) -> tuple[str, Uploaded, int | None]:
        """Return the file's digest, the file, and the number of a part that may be wrong, if there is one."""
        upload: dict[str, Any] = {"Bucket": place.bucket, "Key": place.key}
        upload["UploadId"] = self._fs.call_s3("create_multipart_upload", **upload)["UploadId"]
        put = _Parts(self._fs, upload, size, source, self._limit(size * self._at_once))
        content, parts = Digest(), list[_Done]()
        try:
            for piece, done in transferred(buffer, size, self._at_once, put):
                content.update(piece)
                parts.append(done)
            told = [{"PartNumber": number, "ETag": each.tag} for number, each in enumerate(parts, 1)]
            answer = self._fs.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": told})
        except BaseException:
            with suppress(Exception):  # the store may be away; the next job tidies up
                self.abort(upload)
            raise
        self._learn(put, place)
        copies = source.copies + 1 if source and any(each.copied for each in parts) else 0
        file = Uploaded(place, answer.get("ETag", ""), size, tuple(each.part for each in parts), copies)
        doubtful = [number for number, each in enumerate(parts) if each.is_doubtful]
        return content.hex(), file, doubtful[-1] if doubtful else None

    def _learn(self, put: _Parts, place: Place) -> None:
        if put.is_gone and put.source is not None:
            self._uploads.forget(put.source)
        if put.refusal is not None:
            self._give_up_copying(place, str(put.refusal))

    def _give_up_copying(self, place: Place, reason: str) -> None:
        self._copies = False
        logger.debug("s3://%s: no part is copied from now on: %s", place.bucket, reason)

    def _is_right(self, place: Place, buffer: Bytes, start: int, size: int) -> bool:
        """Return whether what the store has copied is right; it is read back once in a process."""
        if not self._has_proved:
            expected = buffer[start : start + size]
            with suppress(Exception):  # then it is sent, which fails as well if the store is away
                path = f"{place.bucket}/{place.key}"
                found = self._fs.cat_file(path, start=start, end=start + len(expected))
                self._has_proved = digest(found) == digest(expected)
        return self._has_proved


class _Parts:
    """The parts of one upload.

    Attributes:
        source: the file to copy from, if any.
        is_gone: whether that was no longer there, or no longer the same.
        refusal: why the store did not copy a part that it took when it was sent.
    """

    def __init__(
        self, filesystem: Any, upload: dict[str, Any], size: int, source: Uploaded | None, limit: float
    ) -> None:
        self._fs = filesystem
        self._upload = upload
        self._size = size
        self._limit = limit
        self.source = source
        self.is_gone = False
        self.refusal: Exception | None = None

    def __call__(self, piece: Bytes, start: int) -> _Done:
        """Have the store copy a part if it has it; else send it."""
        number, found = start // self._size, digest(piece)
        upload = {**self._upload, "PartNumber": number + 1, "timeout": self._limit}
        source = self.source
        there = source.same(number, found, self._size) if source is not None else None
        refusal: Exception | None = None
        if source is not None and there is not None and not self.is_gone and self.refusal is None:
            try:
                return _Done(there, self._copied(upload, source, start, len(piece)), True)
            except Exception as error:
                if _says_gone(error):
                    self.is_gone = True
                else:
                    refusal = error
        tag = self._fs.call_s3("upload_part", **upload, Body=piece.tobytes())["ETag"]
        self.refusal = refusal or self.refusal  # but if nothing goes through, the store is away
        return _Done(Part(found, tag), tag, False)

    def _copied(self, upload: dict[str, Any], source: Uploaded, start: int, nbytes: int) -> str:
        answer = self._fs.call_s3(
            "upload_part_copy",
            **upload,
            CopySource={"Bucket": source.place.bucket, "Key": source.place.key},
            CopySourceIfMatch=source.tag,
            CopySourceRange=f"bytes={start}-{start + nbytes - 1}",
        )
        tag: str = answer["CopyPartResult"]["ETag"]
        return tag


def _says_gone(error: Exception) -> bool:
    """Return whether a store did not copy because the source is not there, or not the same any more."""
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") in _GONE
