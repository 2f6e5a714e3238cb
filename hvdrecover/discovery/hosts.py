"""Hosts and their slots, and the lists that people and programs write of them.

One host a line, in any of the forms in use::

    node1:4              as Horovod has it
    node2 slots=4        as Open MPI has it; max_slots=8 may follow and is not heeded
    node3                slots are not said
    # a comment; also after a host

A list may begin with a byte order mark, end its lines as any system does, and use tabs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdrecover.errors import HostListError

MOST_SLOTS = 4096  # of one host; more is a slip
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.%:@\[\]-]")  # neither in a name, nor in an IPv6 address or a user's name
_WORD = re.compile(r"\s*(\S+)")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_OPTION = re.compile(r"(?P<name>slots|max[_-]slots)\s*=\s*(?P<value>\S*)")
_LINE_ENDS = re.compile(r"\r\n|\r|\n")


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
        data: one host a line, in UTF-8 if it is bytes.
        source: what to name in errors.

    Returns:
        The hosts in the order in which they are named; it may be empty.

    Raises:
        HostListError: a line names no host or no usable number of slots, or a host that was named before.
    """
    text = data if isinstance(data, str) else _decoded(data, source)
    lines: dict[str, int] = {}
    found: list[Host] = []
    for number, line in enumerate(_LINE_ENDS.split(text.removeprefix("\ufeff")), start=1):
        host = _Line(line.partition("#")[0], number, source).host()
        if host is None:
            continue
        if host.name in lines:
            column = line.index(host.name) + 1
            problem = (
                f"'{host.name}' is named before, in line {lines[host.name]}; name it once, with all its slots"
            )
            raise HostListError(source, number, column, problem)
        lines[host.name] = number
        found.append(host)
    return found


def check_name(name: str) -> str:
    """Return what is wrong with the name of a host; an empty string if nothing is."""
    if _NAME.fullmatch(name):
        return ""
    if _UNUSUAL.search(name):
        return f"'{name}' is not a name of a host"
    if name.count(":") > 1 or name.startswith("["):
        return f"'{name}' is an IPv6 address, which Horovod can't take; use the host's name"
    if "@" in name:
        return f"'{name}' has a user in it; name the user in ssh's configuration"
    return f"'{name}' is not a name of a host"


def check_slots(slots: int) -> str:
    """Return what is wrong with a number of slots; an empty string if nothing is."""
    if slots < 1:
        return f"{slots} is not a number of slots; leave a host out that is not to be used"
    return f"{slots} slots are more than any host has" if slots > MOST_SLOTS else ""


def nonsense(hosts: Sequence[Host]) -> str:
    """Return what is wrong with hosts that somebody else's source names; an empty string if nothing is."""
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        return f"'{twice}' is named twice"
    problems = (
        check_name(host.name) or check_slots(1 if host.slots is None else host.slots) for host in hosts
    )
    return next(filter(None, problems), "")


def added_up(names: Iterable[str]) -> list[Host]:
    """Hosts of lists that name a host once for each of its slots."""
    slots: dict[str, int] = {}
    for name in names:
        slots[name] = slots.get(name, 0) + 1
    return [Host(name, count) for name, count in slots.items()]


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        lines = _LINE_ENDS.split(before)
        problem = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise HostListError(source, len(lines), len(lines[-1]) + 1, problem) from None


class _Line:
    """One line of a list, without its comment."""

    def __init__(self, text: str, number: int, source: str) -> None:
        self._text = text
        self._number = number
        self._source = source

    def host(self) -> Host | None:
        """The host that it names; None if it is empty."""
        match = _WORD.match(self._text)
        if match is None:
            return None
        word, place = match[1], match.start(1)
        name, slots = word, None
        if word.count(":") == 1 and not word.startswith("["):
            name, _, number = word.partition(":")
            slots = self._slots(number, place + len(name) + 1)
        if problem := check_name(name):
            raise self._error(place, problem)
        given = self._options(match.end())
        if given is not None and slots is not None:
            raise self._error(match.end(), f"the slots of '{name}' are said twice")
        return Host(name, slots if given is None else given)

    def _options(self, place: int) -> int | None:
        slots: int | None = None
        while (place := len(self._text) - len(self._text[place:].lstrip())) < len(self._text):
            match = _OPTION.match(self._text, place)
            if match is None:
                word = self._text[place:].split()[0]
                raise self._error(place, f"'{word}' is not understood; write slots=N after the host")
            value = self._slots(match["value"], match.start("value"))
            if match["name"] == "slots":
                if slots is not None:
                    raise self._error(place, "the slots are said twice")
                slots = value
            place = match.end()
        return slots

    def _slots(self, text: str, place: int) -> int:
        if not _NUMBER.fullmatch(text):
            raise self._error(place, f"'{text}' is not a number of slots")
        if problem := check_slots(int(text)):
            raise self._error(place, problem)
        return int(text)

    def _error(self, place: int, problem: str) -> HostListError:
        return HostListError(self._source, self._number, place + 1, problem)
