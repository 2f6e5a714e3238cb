"""Errors of storages, as `StorageError`, and without anything secret."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hvdrecover.errors import HvdrecoverError, StorageError
from hvdrecover.redaction import redact

FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def failures(url: str, path: str, action: str) -> Iterator[None]:
    """Turn what the file system raises into a `StorageError`."""
    try:
        yield
    except HvdrecoverError:
        raise
    except Exception as error:
        reason = redact(str(error)) or type(error).__name__
        where = f"{url}/{path}" if path else url
        remedy = "Check the path, the permissions and the state of the storage."
        raise StorageError(where, f"could not {action}: {reason}. {remedy}") from error


def is_full(error: BaseException) -> bool:
    """Return whether a file system had no room left, as an error or what has caused it says."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return True
        cause = cause.__cause__
    return False
