"""What a user decides about durable commits."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hvdrecover.errors import ConfigError


@dataclass(frozen=True)
class Checkpoint:
    """Where durable commits go, how often they are made and how many are kept.

    Attributes:
        url: checkpoint root: a path or an fsspec URL (``file:///…``, ``s3://…``, ``sftp://…``, ``memory://…``).
        every_commits: make every n-th commit durable. With neither this nor ``every_seconds`` every commit
            is due; with both, whichever comes first.
        every_seconds: make a commit durable when the last durable one is older than this.
        keep: how many durable commits to keep, at least 1.
        strict: whether a commit must fit the training state exactly. If not, what fits is loaded, and the
            rest is listed in the log.

    A commit that is due while an earlier one is still being written stays in memory only.

    Raises:
        ConfigError: a value that can't be.
    """

    url: str
    every_commits: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    strict: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | os.PathLike) or not isinstance(os.fspath(self.url), str):
            raise ConfigError("checkpoint", f"{self.url!r} is no path or URL")
        object.__setattr__(self, "url", os.fspath(self.url))
        if not self.url.strip():
            raise ConfigError("checkpoint", "the URL is empty; name a folder or an fsspec URL")
        if self.every_commits is not None and not (
            type(self.every_commits) is int and self.every_commits >= 1
        ):
            raise ConfigError("every_commits", f"{self.every_commits!r} is not a number of commits from 1 on")
        if self.every_seconds is not None and not (_is_number(self.every_seconds) and self.every_seconds > 0):
            raise ConfigError("every_seconds", f"{self.every_seconds!r} is not a number above 0")
        if type(self.keep) is not int or self.keep < 1:
            raise ConfigError(
                "keep", f"{self.keep!r} is not a number from 1 on; the newest commit is always kept"
            )
        if type(self.strict) is not bool:
            raise ConfigError("strict", f"{self.strict!r} is neither True nor False")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
