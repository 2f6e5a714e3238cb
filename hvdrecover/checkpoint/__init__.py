"""Durable commits: their names, the user's settings, and URLs of checkpoint roots without passwords."""

from __future__ import annotations

# Launchers use this module, so it imports the standard library only.
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from hvdrecover import config
from hvdrecover.errors import ConfigError

_NAME = re.compile(r"g([0-9]{4,9})-c([0-9]{8,18})")
# user:password@, also if the password has a '@' or a '/' in it; host:port is not a password.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s@:]*:(?!\d+/)[^\s@]*@)")
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")


def redact(url: str) -> str:
    """Remove user names, passwords and queries, which may hold tokens, from all URLs of a text."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", url))


@dataclass(frozen=True, order=True)
class CommitId:
    """A commit's place in the run; later generations come after earlier ones."""

    generation: int  # number of rendezvous before the commit was made
    commit: int  # number of commits since the run began

    @property
    def name(self) -> str:
        """The commit's folder below the checkpoint root, such as ``g0003-c00000120``."""
        return f"g{self.generation:04d}-c{self.commit:08d}"

    @classmethod
    def parse(cls, name: str) -> CommitId | None:
        """Return the commit whose folder has this name; None if the name is invalid."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        commit = cls(int(match[1]), int(match[2]))
        return commit if commit.name == name else None

    def is_within(self, ranges: Collection[tuple[str, str]]) -> bool:
        """Return whether it lies in one of these ranges, named by their first and their last commit."""
        # Not by name: g10000 sorts before g9999.
        bounds = [(CommitId.parse(first), CommitId.parse(last)) for first, last in ranges]
        return any(first and last and first <= self <= last for first, last in bounds)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Best:
    """A rule that keeps the best commits, ranked by a number among the state's attributes.

    If several commits hold the same number, it was measured once, at the first of them: only that one is
    ranked. A commit whose number is None or not finite is not ranked.

    Attributes:
        metric: the attribute's name, such as ``val_loss`` for ``state.val_loss``.
        mode: ``min`` if a smaller number is better, ``max`` if a larger one is.
        count: how many to keep, at least 1.

    Raises:
        ConfigError: an attribute has an invalid value.

    Examples:
        >>> recover.Keep(last=3, best=recover.Best("accuracy", mode="max", count=2)).best.metric
        'accuracy'
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric.isidentifier():
            problem = f"must be the name of an attribute of the state, got {self.metric!r}"
            raise ConfigError("best.metric", problem)
        if self.mode not in ("min", "max"):
            raise ConfigError("best.mode", f"must be 'min' or 'max', got {self.mode!r}")
        _check_count("best.count", self.count)


@dataclass(frozen=True)
class Keep:
    """The durable commits to keep. A commit is kept if at least one of these rules keeps it.

    Attributes:
        last: number of newest commits to keep, at least 1.
        period: keep one commit for each range of this many commit numbers: the first durable one. With 1000,
            one is kept of 0 to 999, one of 1000 to 1999, and so on. None: no such rule.
        within: keep commits that are younger than this, in seconds. None: no such rule.
        best: keep the best commits by a number of the user's, such as a loss. None: no such rule.

    Raises:
        ConfigError: an attribute has an invalid value.

    Examples:
        >>> keep = recover.Keep(last=3, period=1000, within=24 * 3600, best=recover.Best("val_loss"))
        >>> checkpoint = recover.Checkpoint("s3://bucket/run-1", keep=keep)
    """

    last: int = 3
    period: int | None = None
    within: float | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        _check_count("keep.last", self.last)
        if self.period is not None:
            _check_count("keep.period", self.period)
        if self.within is not None:
            _check_seconds("keep.within", self.within)
        if self.best is not None and not isinstance(self.best, Best):
            raise ConfigError("keep.best", f"must be a Best, such as Best('val_loss'), got {self.best!r}")

    @classmethod
    def of(cls, keep: int | Keep) -> Keep:
        """Return ``keep`` as a `Keep`: a plain integer N means ``Keep(last=N)``.

        Raises:
            ConfigError: ``keep`` is neither an integer ≥ 1 nor a `Keep`.
        """
        if isinstance(keep, Keep):
            return keep
        if type(keep) is not int:
            raise ConfigError("keep", f"must be an integer ≥ 1 or a Keep, got {keep!r}")
        _check_count("keep", keep)
        return cls(last=keep)


@dataclass(frozen=True)
class Checkpoint:
    """Where durable commits are written, how often, and how many are kept.

    Attributes:
        url: checkpoint root: a path or an fsspec URL (``file:///…``, ``s3://…``, ``sftp://…``, ``memory://…``).
            A relative path starts at the folder in which the process was started, even if the script has
            changed its working directory since.
        every_commits: make every n-th commit durable. Without this and ``every_seconds``, every commit is
            due. With both, the earlier of the two decides.
        every_seconds: make a commit durable when the last durable one is older than this.
        keep: how many of the newest durable commits to keep, at least 1; or a `Keep` with more rules.
        strict: whether a commit must fit the training state exactly. If False, the parts that fit are loaded,
            and the others are listed in the log.
        near: the near tier, which keeps each host's newest commit when its processes die. ``"auto"`` uses the
            host's shared memory under ``hvdrecover run`` if there is room; a path uses that folder on a disk
            of the host; None turns the tier off. See docs/near.md.

    A commit that is due while an earlier one is still being written stays in memory only.

    Raises:
        ConfigError: an attribute has an invalid value.

    Examples:
        >>> recover.Checkpoint("s3://bucket/run-1", every_seconds=600).keep
        3
    """

    url: str
    every_commits: int | None = None
    every_seconds: float | None = None
    keep: int | Keep = 3
    strict: bool = True
    near: str | None = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | os.PathLike) or not isinstance(os.fspath(self.url), str):
            raise ConfigError("checkpoint", f"must be a path or URL, got {self.url!r}")
        if not (url := os.fspath(self.url)).strip():
            raise ConfigError("checkpoint", "the URL is empty; name a folder or an fsspec URL")
        object.__setattr__(self, "url", config.absolute(url))
        if self.every_commits is not None:
            _check_count("every_commits", self.every_commits)
        if self.every_seconds is not None:
            _check_seconds("every_seconds", self.every_seconds)
        if self.near is not None:
            if not isinstance(self.near, str | os.PathLike) or not os.fspath(self.near).strip():
                raise ConfigError("near", f"must be 'auto', a folder or None, got {self.near!r}")
            near = os.fspath(self.near)
            object.__setattr__(self, "near", near if near == "auto" else config.absolute(near))
        Keep.of(self.keep)
        if type(self.strict) is not bool:
            raise ConfigError("strict", f"must be True or False, got {self.strict!r}")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(name, f"must be an integer ≥ 1, got {value!r}")


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or type(value) is bool or not value > 0:
        raise ConfigError(name, f"must be a number of seconds > 0, got {value!r}")
