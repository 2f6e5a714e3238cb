"""The results of earlier calls of host discovery, as they are kept in a file for the next call."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from hvdrecover.discovery.checks import Health
from hvdrecover.discovery.hosts import Host

_FORMAT = 2
_BEGINNING = f'{{"format": {_FORMAT}'.encode()


@dataclass(frozen=True)
class History:
    """The known facts about the hosts; times are in seconds since the epoch."""

    hosts: tuple[Host, ...] = ()  # the source's last good answer, in its order; empty before the first one
    listed: float | None = None  # time of that answer
    asked: float | None = None  # time at which the source last answered or failed
    failure: str = ""  # why the source's last answer was not good
    empty: bool = False  # whether the failure is that no host was named
    first_seen: dict[str, float] = field(default_factory=dict)  # since when each host is named
    health: dict[str, Health] = field(default_factory=dict)  # health of the checked hosts
    healthy: tuple[str, ...] = ()  # the hosts that were healthy when at least one was
    healthy_at: float | None = None  # time of `healthy`


def dumps(history: History) -> bytes:
    """Return the history as one line of JSON."""
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(history)}).encode()


def loads(text: bytes) -> History:
    """Return the history of a line of JSON; an empty one if the text is damaged or of another version."""
    try:
        values = json.loads(text)
        if values.pop("format") != _FORMAT:
            return History()
        values["hosts"] = tuple(Host(**each) for each in values["hosts"])
        values["health"] = {name: Health(**each) for name, each in values["health"].items()}
        values["healthy"] = tuple(values["healthy"])
        return History(**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return History()


def read(path: Path) -> History:
    """Return the history in a file; an empty one without a usable file."""
    try:
        return loads(path.read_bytes())
    except OSError:
        return History()


def is_one(text: bytes) -> bool:
    """Return whether a file's content is a history."""
    return text.startswith(_BEGINNING)
