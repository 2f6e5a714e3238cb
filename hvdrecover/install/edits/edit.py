"""One edit of Horovod's source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """One named replacement in one file of Horovod's source.

    Attributes:
        name: how messages call it.
        file: the file, relative to the root of the source tree.
        old: the text to replace; it must occur exactly once.
        new: what takes its place.
        why: what goes wrong without it.
        until: if given, all that comes before the next occurrence of this text is replaced as well.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    until: str = ""
