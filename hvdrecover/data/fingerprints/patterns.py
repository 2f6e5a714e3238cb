"""Names with wildcards: ``*``, ``?`` and ``[…]`` within a name, ``**`` for any number of folders.

They mean the same on every kind of storage. A ``*`` takes names that begin with a dot, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

_WILD = frozenset("*?[")
_ANY_DEPTH = "**"


def is_wild(path: str) -> bool:
    """Return whether a path has wildcards."""
    return not _WILD.isdisjoint(path)


def split(path: str) -> tuple[str, tuple[str, ...]]:
    """A path with wildcards as the folder before the first of them, and the names after it."""
    names = path.split("/")
    first = next(number for number, name in enumerate(names) if is_wild(name))
    return "/".join(names[:first]) or "/"[: path.startswith("/")], tuple(names[first:])


def fits(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a file is meant by a pattern: its path fits, or that of a folder that it is in.

    Args:
        path: the names that lead to the file.
        pattern: as from `split`; an empty one fits everything.
    """
    if not pattern or not path:
        return not pattern
    if pattern[0] == _ANY_DEPTH:
        return fits(path, pattern[1:]) or fits(path[1:], pattern)
    return fnmatchcase(path[0], pattern[0]) and fits(path[1:], pattern[1:])


def leads(folder: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a folder may have files below it that a pattern means."""
    if not pattern or not folder or pattern[0] == _ANY_DEPTH:
        return True
    return fnmatchcase(folder[0], pattern[0]) and leads(folder[1:], pattern[1:])
