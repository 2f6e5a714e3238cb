"""Plain Python objects as JSON and back, without ever running code.

JSON's own types stand for themselves. Everything else is an object with one key that begins with ``$``::

    (1, 2)             {"$tuple": [1, 2]}
    {3: "x"}           {"$dict": [[3, "x"]]}
    Phase.WARMUP       {"$enum": ["train:Phase", "WARMUP"]}
    np.float32(0.5)    {"$numpy": ["<f4", [], "AAAAPw=="]}

Enums, dataclasses and named tuples are found again among the modules that are already imported; nothing is
imported, no constructor is called, and nothing but those three kinds of class is ever made.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import enum
import functools
import math
import operator
import pathlib
import sys
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdrecover.errors import UnsupportedValueError

Json = Any
Leaf = Callable[[Any, str], Json]
"""Encodes what it knows, given the value and its path, and returns `NotImplemented` for the rest."""
Resolve = Callable[[str, Any], Any]
"""Turns ``("$tag", payload)`` of a `Leaf` back into a value; raises KeyError for a tag that it doesn't know."""

_REMEDY = (
    "Keep it as a dict, list or dataclass of plain values, give it state_dict() and load_state_dict(), "
    "or leave it out of the state and make it inside the training function."
)


def encode(value: Any, path: str, leaf: Leaf | None = None) -> Json:
    """Turn a value into what `json.dumps` takes.

    Args:
        value: plain Python: None, bool, int, float, complex, str, bytes, list, tuple, named tuple, dict,
            OrderedDict, Counter, set, frozenset, deque, numpy scalar or array, path, date, time, datetime,
            timedelta, enum, dataclass; nested at will.
        path: what the value is called in an error.
        leaf: encodes what a framework adds to these, such as tensors.

    Raises:
        UnsupportedValueError: the value, or one inside it, is none of these; the error names it.
    """
    return _encode(value, path, leaf, ())


def _encode(value: Any, path: str, leaf: Leaf | None, outer: tuple[int, ...]) -> Json:
    if leaf is not None and (encoded := leaf(value, path)) is not NotImplemented:
        return encoded
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if id(value) in outer:
        raise UnsupportedValueError(path, f"the {kind.__name__} contains itself, which JSON can't hold. {_REMEDY}")
    outer = (*outer, id(value))

    def inner(item: Any, where: str) -> Json:
        return _encode(item, path + where, leaf, outer)

    if kind is list:
        return [inner(item, f"[{index}]") for index, item in enumerate(value)]
    if kind is dict:
        return _encode_dict(value, inner)
    for matches, tag, pack in _KINDS:
        if matches(value):
            return {tag: pack(value, path, inner)}
    raise UnsupportedValueError(
        path, f"a {kind.__module__}.{kind.__qualname__} can't be part of a commit: JSON can't hold it. {_REMEDY}"
    )


def _encode_dict(value: dict[Any, Any], inner: Callable[[Any, str], Json]) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, f"[{key!r}]") for key, item in value.items()}
    return {"$dict": _pairs(value, inner)}


def _pairs(value: Any, inner: Callable[[Any, str], Json]) -> list[Json]:
    return [[inner(key, f" key {key!r}"), inner(item, f"[{key!r}]")] for key, item in value.items()]


def _items(value: Any, path: str, inner: Callable[[Any, str], Json]) -> list[Json]:
    return [inner(item, f"[{index}]") for index, item in enumerate(value)]


def _members(value: Any, path: str, inner: Callable[[Any, str], Json]) -> list[Json]:
    # A set's own order differs from process to process; commits of equal states should be equal.
    return sorted((inner(item, f" member {item!r}") for item in value), key=repr)


def _numpy(value: Any, path: str, inner: Callable[[Any, str], Json]) -> list[Json]:
    array = np.asarray(value)
    if array.dtype.kind not in "biufcSUMm":
        raise UnsupportedValueError(path, f"a numpy array of dtype {array.dtype} can't be part of a commit. {_REMEDY}")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return [array.dtype.str, list(array.shape), data, isinstance(value, np.generic)]


def _dataclass(value: Any, path: str, inner: Callable[[Any, str], Json]) -> list[Json]:
    fields = {
        field.name: inner(getattr(value, field.name), f".{field.name}") for field in dataclasses.fields(value)
    }
    return [_class_name(type(value), path), fields]


def _datetime(value: Any, path: str, inner: Callable[[Any, str], Json]) -> list[Json]:
    zone = value.tzinfo.key if isinstance(value.tzinfo, zoneinfo.ZoneInfo) else None
    return [value.isoformat(), zone, value.fold]


def _class_name(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find_class(name) is not kind:
        raise UnsupportedValueError(
            path, f"the class {name} can't be found by its name. Define it at the top level of a module."
        )
    return name


def _find_class(name: str) -> Any:
    """The class ``module:Outer.Inner`` if its module is imported, else None. Runs no module's code."""
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        if found is None:
            return None
        found = vars(found).get(part)
    return found if isinstance(found, type) else None


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


_KINDS: tuple[tuple[Callable[[Any], bool], str, Callable[..., Json]], ...] = (
    # Before the types that they are subclasses of: np.float64 is a float, an IntEnum is an int.
    (lambda v: isinstance(v, np.generic | np.ndarray), "$numpy", _numpy),
    (lambda v: isinstance(v, enum.Enum), "$enum", lambda v, p, _: [_class_name(type(v), p), v.name or ""]),
    (
        _is_named_tuple,
        "$namedtuple",
        lambda v, p, inner: [_class_name(type(v), p), _items(v, p, inner)],
    ),
    (
        lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type),
        "$dataclass",
        _dataclass,
    ),
    (lambda v: type(v) is tuple, "$tuple", _items),
    (lambda v: type(v) is set, "$set", _members),
    (lambda v: type(v) is frozenset, "$frozenset", _members),
    (
        lambda v: type(v) is collections.deque,
        "$deque",
        lambda v, p, inner: [_items(v, p, inner), v.maxlen],
    ),
    (lambda v: type(v) is collections.OrderedDict, "$ordereddict", lambda v, _, inner: _pairs(v, inner)),
    (lambda v: type(v) is collections.Counter, "$counter", lambda v, _, inner: _pairs(v, inner)),
    (lambda v: type(v) is bytes, "$bytes", lambda v, *_: base64.b64encode(v).decode()),
    (lambda v: type(v) is complex, "$complex", lambda v, *_: [repr(v.real), repr(v.imag)]),
    (lambda v: isinstance(v, pathlib.Path), "$path", lambda v, *_: str(v)),
    (lambda v: isinstance(v, pathlib.PurePosixPath), "$purepath", lambda v, *_: str(v)),
    (lambda v: type(v) is datetime.datetime, "$datetime", _datetime),
    (lambda v: type(v) is datetime.date, "$date", lambda v, *_: v.isoformat()),
    (lambda v: type(v) is datetime.time, "$time", lambda v, *_: v.isoformat()),
    (
        lambda v: type(v) is datetime.timedelta,
        "$timedelta",
        lambda v, *_: [v.days, v.seconds, v.microseconds],
    ),
)


def decode(value: Json, resolve: Resolve | None = None) -> Any:
    """Turn the outcome of `encode` back into the value, with fresh containers.

    Args:
        value: what `json.loads` gave.
        resolve: the counterpart of `encode`'s ``leaf``.

    Raises:
        ValueError: an unknown tag, a malformed payload, or a class that this program doesn't define.
    """
    if isinstance(value, list):
        return [decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, resolve) for key, item in value.items()}
    try:
        if tag in _UNPACK:
            return _UNPACK[tag](value[tag], lambda item: decode(item, resolve))
        if resolve is not None:
            return resolve(tag, value[tag])
    except (KeyError, TypeError, IndexError, OverflowError, AttributeError, zoneinfo.ZoneInfoNotFoundError) as error:
        raise ValueError(f"a malformed {tag}: {error!r}") from error
    raise ValueError(f"an unknown kind of value, {tag}")


def _unpack_numpy(payload: Any, inner: Callable[[Any], Any]) -> Any:
    dtype = np.dtype(str(payload[0]))
    if dtype.kind not in "biufcSUMm":
        raise ValueError(f"the dtype {dtype} is not plain")
    array = np.frombuffer(base64.b64decode(payload[2]), dtype=dtype).reshape(payload[1]).copy()
    return array[()] if payload[3] else array


def _unpack_enum(payload: Any, inner: Callable[[Any], Any]) -> Any:
    kind = _require(payload[0], lambda kind: issubclass(kind, enum.Enum))
    # A combination of flags is named after its parts: "READ|WRITE"; the empty one has no name.
    parts = [kind.__members__[name] for name in payload[1].split("|")] if payload[1] else [kind(0)]
    return functools.reduce(operator.or_, parts)


def _unpack_dataclass(payload: Any, inner: Callable[[Any], Any]) -> Any:
    kind = _require(payload[0], dataclasses.is_dataclass)
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, inner(payload[1][field.name]))
    return made


def _unpack_named_tuple(payload: Any, inner: Callable[[Any], Any]) -> Any:
    kind = _require(payload[0], lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return tuple.__new__(kind, inner(payload[1]))


def _require(name: str, fits: Callable[[type], bool]) -> Any:
    kind = _find_class(name)
    if kind is None or not fits(kind):
        raise ValueError(f"this program does not define the class {name}; import or define it before resuming")
    return kind


def _unpack_datetime(payload: Any, inner: Callable[[Any], Any]) -> datetime.datetime:
    made = datetime.datetime.fromisoformat(payload[0]).replace(fold=payload[2])
    return made if payload[1] is None else made.replace(tzinfo=zoneinfo.ZoneInfo(payload[1]))


_UNPACK: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$float": lambda p, _: float(p),
    "$numpy": _unpack_numpy,
    "$enum": _unpack_enum,
    "$namedtuple": _unpack_named_tuple,
    "$dataclass": _unpack_dataclass,
    "$tuple": lambda p, inner: tuple(inner(p)),
    "$set": lambda p, inner: set(inner(p)),
    "$frozenset": lambda p, inner: frozenset(inner(p)),
    "$deque": lambda p, inner: collections.deque(inner(p[0]), p[1]),
    "$dict": lambda p, inner: {inner(key): inner(item) for key, item in p},
    "$ordereddict": lambda p, inner: collections.OrderedDict((inner(key), inner(item)) for key, item in p),
    "$counter": lambda p, inner: collections.Counter({inner(key): inner(item) for key, item in p}),
    "$bytes": lambda p, _: base64.b64decode(p),
    "$complex": lambda p, _: complex(float(p[0]), float(p[1])),
    "$path": lambda p, _: pathlib.Path(p),
    "$purepath": lambda p, _: pathlib.PurePosixPath(p),
    "$datetime": _unpack_datetime,
    "$date": lambda p, _: datetime.date.fromisoformat(p),
    "$time": lambda p, _: datetime.time.fromisoformat(p),
    "$timedelta": lambda p, _: datetime.timedelta(*p),
}
