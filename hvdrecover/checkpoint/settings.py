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
        object.__setattr__(self, "url", os.fspath(self.url))
        if not self.url:
            raise ConfigError("checkpoint", "the URL is empty; name a folder or an fsspec URL")
        if self.every_commits is not None and self.every_commits < 1:
            raise ConfigError("every_commits", f"{self.every_commits} is less than 1")
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise ConfigError("every_seconds", f"{self.every_seconds} is not more than 0")
        if self.keep < 1:
            raise ConfigError("keep", f"{self.keep} is less than 1; the newest commit is always kept")
