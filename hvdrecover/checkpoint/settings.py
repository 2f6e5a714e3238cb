"""The user's settings of durable commits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from hvdrecover import config
from hvdrecover.errors import ConfigError


@dataclass(frozen=True)
class Best:
    """The best commits by a number that the training keeps among the state's attributes.

    Where several commits in a row hold the same number, it was measured once: the first of them counts. A
    commit whose number is None or not finite counts for none.

    Attributes:
        metric: the attribute's name, such as ``val_loss`` for ``state.val_loss``.
        mode: ``min`` if a smaller number is better, ``max`` if a larger one is.
        count: how many to keep, at least 1.

    Raises:
        ConfigError: a value that can't be.

    Examples:
        >>> recover.Keep(last=3, best=recover.Best("accuracy", mode="max", count=2)).best.metric
        'accuracy'
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric.isidentifier():
            raise ConfigError("best.metric", f"{self.metric!r} is not the name of an attribute of the state")
        if self.mode not in ("min", "max"):
            raise ConfigError("best.mode", f"{self.mode!r} is neither 'min' nor 'max'")
        if not _is_count(self.count):
            raise ConfigError("best.count", f"{self.count!r} is not a number of commits from 1 on")


@dataclass(frozen=True)
class Keep:
    """The durable commits to keep: those that any of these rules asks for.

    Attributes:
        last: the newest so many, at least 1.
        period: the first durable one of each run of so many commit numbers; None for no such rule. Which
            commits were made durable doesn't matter: with 1000, one is kept of 0 to 999, one of 1000 to
            1999, and so on.
        within: those written less than so many seconds ago; None for no such rule.
        best: the best ones by a number of the user's; None for no such rule.

    Raises:
        ConfigError: a value that can't be.

    Examples:
        >>> keep = recover.Keep(last=3, period=1000, within=24 * 3600, best=recover.Best("val_loss"))
        >>> checkpoint = recover.Checkpoint("s3://bucket/run-1", keep=keep)
    """

    last: int = 3
    period: int | None = None
    within: float | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise ConfigError(
                "keep.last", f"{self.last!r} is not a number from 1 on; the newest commit is always kept"
            )
        if self.period is not None and not _is_count(self.period):
            raise ConfigError("keep.period", f"{self.period!r} is not a number of commits from 1 on")
        if self.within is not None and not _is_positive(self.within):
            raise ConfigError("keep.within", f"{self.within!r} is not a number above 0")
        if self.best is not None and not isinstance(self.best, Best):
            raise ConfigError("keep.best", f"{self.best!r} is not a Best, such as Best('val_loss')")

    @classmethod
    def of(cls, keep: int | Keep) -> Keep:
        """Return what a plain number stands for: that many of the newest.

        Raises:
            ConfigError: it is neither a number from 1 on nor a `Keep`.
        """
        if isinstance(keep, Keep):
            return keep
        if not _is_count(keep):
            raise ConfigError(
                "keep",
                f"{keep!r} is neither a number from 1 on, as the newest commit is always kept, nor a Keep",
            )
        return cls(last=keep)


@dataclass(frozen=True)
class Checkpoint:
    """The place of durable commits, how often they are made and how many are kept.

    Attributes:
        url: checkpoint root: a path or an fsspec URL (``file:///…``, ``s3://…``, ``sftp://…``, ``memory://…``).
            A relative path is below the folder in which the process started, also after the script has
            changed its folder.
        every_commits: make every n-th commit durable. With neither this nor ``every_seconds`` nor
            ``interval`` every commit is due; with the first two, whichever comes first.
        every_seconds: make a commit durable when the last durable one is older than this.
        keep: how many of the newest durable commits to keep, at least 1; or a `Keep` with more rules.
        strict: whether a commit must fit the training state exactly. If not, what fits is loaded, and the
            rest is listed in the log.
        near: the near tier, which keeps commits in each host's memory when processes die: ``"auto"`` for the
            host's shared memory under ``hvdrecover run`` if there is room, a folder on a disk of the host, or
            None for no such tier. See docs/near.md.
        interval: ``"auto"`` measures what durable commits cost, counts how often the job is lost, and chooses
            the time between durable commits by that. Not with ``every_commits`` or ``every_seconds``.

    A commit that is due while an earlier one is still being written stays in memory only.

    Raises:
        ConfigError: a value that can't be.

    Examples:
        >>> recover.Checkpoint("s3://bucket/run-1", every_seconds=600).keep
        3
    """

    url: str
    every_commits: int | None = None
    every_seconds: float | None = None
    keep: int | Keep = 3
    strict: bool = True
    interval: Literal["auto"] | None = None
    near: str | None = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | os.PathLike) or not isinstance(os.fspath(self.url), str):
            raise ConfigError("checkpoint", f"{self.url!r} is not a path or URL")
        if not (url := os.fspath(self.url)).strip():
            raise ConfigError("checkpoint", "the URL is empty; name a folder or an fsspec URL")
        object.__setattr__(self, "url", config.absolute(url))
        if self.every_commits is not None and not _is_count(self.every_commits):
            raise ConfigError("every_commits", f"{self.every_commits!r} is not a number of commits from 1 on")
        if self.every_seconds is not None and not _is_positive(self.every_seconds):
            raise ConfigError("every_seconds", f"{self.every_seconds!r} is not a number above 0")
        if self.interval not in (None, "auto"):
            reason = "use 'auto', every_commits=N for every N-th commit, or every_seconds=S"
            raise ConfigError("interval", f"{self.interval!r} is not 'auto'; {reason}")
        if self.interval is not None and (self.every_commits is not None or self.every_seconds is not None):
            raise ConfigError("interval", "'auto' decides alone; leave out every_commits and every_seconds")
        if self.near is not None:
            if not isinstance(self.near, str | os.PathLike) or not os.fspath(self.near).strip():
                raise ConfigError("near", f"{self.near!r} is neither 'auto', nor a folder, nor None")
            near = os.fspath(self.near)
            object.__setattr__(self, "near", near if near == "auto" else config.absolute(near))
        Keep.of(self.keep)
        if type(self.strict) is not bool:
            raise ConfigError("strict", f"{self.strict!r} is neither True nor False")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and value > 0
