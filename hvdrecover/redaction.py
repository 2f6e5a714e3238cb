"""Taking what is secret out of texts that others may read."""

from __future__ import annotations

import re

# A user and password, also if the password has a '@' or a '/' in it (but a port is not a password); a query.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s@:]*:(?!\d+/)[^\s@]*@)")
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")


def redact(url: str) -> str:
    """A URL, or a text with URLs, without user names, passwords and queries, which may hold tokens."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", url))
