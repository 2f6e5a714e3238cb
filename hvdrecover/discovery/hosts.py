"""Hosts and their slots, and the lists that people and programs write of them.

A list names one host a line, in any of these forms::

    node1:4              Horovod's form
    node2 slots=4        Open MPI's form; max_slots=8 may follow and is ignored
    node3                no number of slots
    # a comment; also after a host
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdrecover.errors import HostListError

MOST_SLOTS = 4096  # maximum for one host; a larger number is a typing error
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_OPTION = re.compile(r"\s+(?:slots\s*=\s*(?P<slots>\S*)|max[_-]slots\s*=\s*\S*|(?P<unknown>\S+))")
LINE_ENDS = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Host:
    """A host that a source names.

    Attributes:
        name: as ssh takes it.
        slots: how many processes it takes; None if the source does not say.

    Examples:
        >>> from hvdrecover.discovery import Host
        >>> [Host("node1", slots=4), Host("node2")]
        [Host(name='node1', slots=4), Host(name='node2', slots=None)]
    """

    name: str
    slots: int | None = None


def parse(data: bytes | str, source: str) -> list[Host]:
    """Read a list of hosts.

    Args:
        data: one host a line; bytes must be UTF-8.
        source: the name of the list in errors.

    Returns:
        The hosts in the order of the list, which may be empty.

    Raises:
        HostListError: a line has no valid name or number of slots, or repeats a host.
    """
    text = data if isinstance(data, str) else _decode(data, source)
    lines: dict[str, int] = {}
    hosts: list[Host] = []
    for number, line in enumerate(LINE_ENDS.split(text.removeprefix("\ufeff")), start=1):
        host = _parse_line(line.partition("#")[0], number, source)
        if host is None:
            continue
        if host.name in lines:
            problem = f"'{host.name}' is also in line {lines[host.name]}; name it once, with all its slots"
            raise HostListError(source, number, line.index(host.name) + 1, problem)
        lines[host.name] = number
        hosts.append(host)
    return hosts


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        lines = LINE_ENDS.split(data[: error.start].decode())
        problem = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise HostListError(source, len(lines), len(lines[-1]) + 1, problem) from None


def _parse_line(text: str, number: int, source: str) -> Host | None:
    """Return the host of a line without its comment; None if the line is empty."""
    match = re.match(r"\s*(\S+)", text)
    if match is None:
        return None
    name, place = match[1], match.start(1)
    counts: list[tuple[int, str]] = []  # columns and texts
    if name.count(":") == 1 and not name.startswith("["):
        name, _, count = name.partition(":")
        counts.append((place + len(name) + 1, count))
    if problem := check_name(name):
        raise HostListError(source, number, place + 1, problem)
    for option in _OPTION.finditer(text, match.end()):
        if option["unknown"]:
            problem = f"unknown word '{option['unknown']}'; write slots=N after the host"
            raise HostListError(source, number, option.start("unknown") + 1, problem)
        if option["slots"] is not None:
            counts.append((option.start("slots"), option["slots"]))
    if len(counts) > 1:
        raise HostListError(source, number, counts[1][0] + 1, f"'{name}' has two numbers of slots")
    if not counts:
        return Host(name)
    column, count = counts[0]
    if problem := check_count(count):
        raise HostListError(source, number, column + 1, problem)
    return Host(name, int(count))


def check_name(name: str) -> str:
    """Return the problem with the name of a host, or an empty string."""
    if _NAME.fullmatch(name):
        return ""
    if re.fullmatch(r"\[?[0-9A-Fa-f:.%]*:[A-Za-z0-9:.%\]]*", name):
        return f"'{name}' is an IPv6 address, which Horovod does not support; use the host's name"
    if re.fullmatch(r"[\w.-]+@[\w.-]+", name):
        return f"'{name}' contains a user; name the user in ssh's configuration"
    return f"'{name}' is not a valid host name"


def check_slots(slots: int) -> str:
    """Return the problem with a number of slots, or an empty string."""
    if slots < 1:
        return f"slots must be at least 1, got {slots}; leave out a host that must not be used"
    return f"slots must be at most {MOST_SLOTS}, got {slots}" if slots > MOST_SLOTS else ""


def check_count(text: str) -> str:
    """Return the problem with the text of a number of slots, or an empty string."""
    if not _NUMBER.fullmatch(text):
        return f"slots must be an integer, got '{text}'"
    return check_slots(int(text))


def check_hosts(hosts: Sequence[Host]) -> str:
    """Return the problem with the hosts that a source returned, or an empty string."""
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        return f"'{next(name for name in names if names.count(name) > 1)}' is named twice"
    problems = (
        check_name(host.name) or check_slots(1 if host.slots is None else host.slots) for host in hosts
    )
    return next(filter(None, problems), "")


def count_slots(names: Iterable[str]) -> list[Host]:
    """Return the hosts of a list that names a host once for each of its slots."""
    slots: dict[str, int] = {}
    for name in names:
        slots[name] = slots.get(name, 0) + 1
    return [Host(name, count) for name, count in slots.items()]
