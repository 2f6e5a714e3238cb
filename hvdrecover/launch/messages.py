"""The content of messages between the supervisor and its guardians; pure functions.

Both sides go by what they are sent, so each message is checked where it comes in. Whatever a connection
brings, later code finds all fields that it needs, each of its type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]

LONGEST = 1 << 18  # bytes in a message; longer ones are clipped by their sender
_CLIPS = (
    1 << 15,
    1 << 11,
    1 << 7,
)  # characters of a text that are kept, the largest that makes a message fit
_ENTRIES = 1 << 7  # for as many characters, one entry of a list or an object is kept
_MOST = 1 << 53  # beyond, JSON's numbers are not exact

_Check = Callable[[Any], bool]


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the line that is sent; if it would be too long, of each text only its beginning and its end."""
    line = _line(message)
    for most in _CLIPS:
        if len(line) <= LONGEST:
            break
        line = _line(_clipped(message, most))
    return line


def of_guardian(message: Message) -> Message | None:
    """Return what a guardian sends, or None if it isn't what guardians send."""
    return _checked(message, "kind", _KINDS, _REPORTED)


def of_supervisor(message: Message) -> Message | None:
    """Return an order of the supervisor, or None if it isn't one."""
    return _checked(message, "order", _ORDERS, _ORDERED)


def of_newcomer(message: Message) -> tuple[str, int | None] | None:
    """Return host and slot of a guardian that has just come; None if they aren't any."""
    host, slot = message.get("name", ""), message.get("slot")
    return (host, slot) if _is_text(host) and _or_none(_is_count)(slot) else None


def _line(message: object) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


def _clipped(value: Any, most: int) -> Any:
    if isinstance(value, str) and len(value) > most:
        return f"{value[: most // 4]}\n… {len(value) - most} characters …\n{value[-most * 3 // 4 :]}"
    if isinstance(value, Mapping):
        return {key: _clipped(each, most) for key, each in list(value.items())[: max(64, most // _ENTRIES)]}
    if isinstance(value, (list, tuple)):
        return [_clipped(each, most) for each in value[: max(2, most // _ENTRIES)]]
    return value


def _checked(
    message: Message, name: str, kinds: Mapping[str, tuple[str, ...]], fields: Mapping[str, _Check]
) -> Message | None:
    """A message of a known kind, whose fields are all that this kind needs, each of its type.

    Fields that nobody here knows are left out, as those of a newer version may be anything.
    """
    kind = message.get(name)
    needed = kinds.get(kind) if isinstance(kind, str) else None
    if needed is None or any(each not in message for each in needed):
        return None
    known = {each: value for each, value in message.items() if each in fields}
    if not all(fields[each](value) for each, value in known.items()):
        return None
    return {name: kind, **known}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_seconds(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, float) and math.isfinite(value) and 0 <= value < _MOST)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _are_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_waiting(value: Any) -> bool:
    return isinstance(value, dict) and all(
        rank.isascii()
        and rank.isdigit()
        and len(rank) < 16
        and isinstance(names, list)
        and all(map(_is_text, names))
        for rank, names in value.items()
    )


def _are_causes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and _is_number(each.get("exit"))
        and _is_text(each.get("identity"))
        and _is_pair(each.get("point"))
        for each in value
    )


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


# What guardians send: the fields that each kind needs, and what each field must be wherever it stands.
_KINDS: dict[str, tuple[str, ...]] = {
    "commit": ("commit",),
    "end": ("how",),
    "diverged": (),
    "stacks": (),
    "stalled": ("missing", "seconds"),
    "where": ("rank", "place"),
    "event": ("event", "age"),
    "fault": ("fault", "message", "exit", "detail", "commit", "point"),
}
_REPORTED: dict[str, _Check] = {
    "again": _is_flag,
    "age": _is_seconds,
    "begun": _is_flag,
    "commit": _is_pair,
    "detail": _is_text,
    "end": _is_text,
    "event": _is_object,
    "exit": _is_number,
    "fault": _is_text,
    "final": _is_flag,
    "heard": _is_flag,
    "how": _is_text,
    "identity": _is_text,
    "loaded": _or_none(_is_text),
    "message": _is_text,
    "missing": _are_waiting,
    "place": _or_none(_is_text),
    "point": _is_pair,
    "rank": _is_count,
    "root": _is_text,
    "seconds": _is_seconds,
    "silent": _is_seconds,
    "slot": _or_none(_is_count),
    "steps": _is_count,
    "traceback": _is_text,
}
# The same of what the supervisor orders.
_ORDERS: dict[str, tuple[str, ...]] = {
    "know": ("committed", "causes", "root"),
    "leave": ("grace",),
    "stacks": (),
    "stop": (),
    "where": ("ranks",),
}
_ORDERED: dict[str, _Check] = {
    "causes": _are_causes,
    "committed": _is_flag,
    "grace": _is_seconds,
    "ranks": _are_ranks,
    "root": _is_text,
    "shows_error": _is_flag,
}
