"""Huge pages for all of a training process's memory.

Linux gives them to processes that ask, and neither frameworks nor Python do. So a new process gets its state
of a gigabyte in 250,000 pages, and one that is killed gives them back one by one before anybody is told of
its death. glibc, from 2.35 on, asks in the place of all if it is told so before the process starts.
"""

from __future__ import annotations

from collections.abc import Mapping

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def asked_for(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a process has its memory in huge pages; nothing if the user has decided.

    Args:
        environ: its environment.
    """
    given = environ.get(_TUNABLES, "")
    if _HUGE_PAGES in given:
        return {}
    return {_TUNABLES: ":".join([*([given] if given else []), f"{_HUGE_PAGES}=1"])}
