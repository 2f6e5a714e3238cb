"""The policy of durable commits, as pure functions; `retention` decides which are deleted."""

from __future__ import annotations

from hvdrecover.checkpoint.settings import Checkpoint


def is_due(settings: Checkpoint, commits_since: int, seconds_since: float, auto: float = 0.0) -> bool:
    """Return whether a commit should be made durable.

    Args:
        settings: the user's wishes.
        commits_since: commits since the last durable one, this one included.
        seconds_since: seconds since the last durable one was begun; ``inf`` when there is none.
        auto: with ``interval="auto"``, how many seconds that takes now.
    """
    if settings.interval == "auto":
        return seconds_since >= auto
    if settings.every_commits is None and settings.every_seconds is None:
        return True
    by_count = settings.every_commits is not None and commits_since >= settings.every_commits
    by_time = settings.every_seconds is not None and seconds_since >= settings.every_seconds
    return by_count or by_time


def retry_delay(attempt: int, *, first: float = 0.5, cap: float = 30.0) -> float:
    """Seconds to wait before the ``attempt``-th retry (from 1): doubled each time, up to ``cap``."""
    return min(cap, first * 2.0 ** (attempt - 1))
