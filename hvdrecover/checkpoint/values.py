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
import dataclasses
import enum
import functools
import math
import operator
import re
import sys
import types
import zoneinfo
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.errors import UnsupportedValueError

Json = Any
Leaf = Callable[[Any, str], Json]
"""Encodes a value, given the value and its path; returns `NotImplemented` for an unknown type."""
Resolve = Callable[[str, Any], Any]
"""Turns ``("$tag", payload)`` of a `Leaf` back into a value; raises KeyError for a tag it doesn't know."""

_PLAIN_DTYPE = re.compile(r"[<>|=]?[biufcSUMm]\d*(\[\w+\])?")
_MAX_DEPTH = 100  # keeps clear of Python's recursion limit, also when decoding
_MAX_INT_BITS = 2048  # Python refuses to read or write integers of more than 4300 decimal digits
_REMEDY = (
    "Keep it as a dict, list or dataclass of plain values, give it state_dict() and load_state_dict(), "
    "or leave it out of the state and make it inside the training function."
)


def encode(value: Any, path: str, leaf: Leaf | None = None, _depth: int = 0) -> Json:
    """Turn a value into what `json.dumps` takes; ``leaf`` encodes the objects of a framework."""
    if leaf is not None and (encoded := leaf(value, path)) is not NotImplemented:
        return encoded
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= _MAX_INT_BITS else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if _depth == _MAX_DEPTH:
        reason = f"it lies more than {_MAX_DEPTH} containers deep, or contains itself. {_REMEDY}"
        raise UnsupportedValueError(path, reason)

    def inner(item: Any, where: str) -> Json:
        return encode(item, path + where, leaf, _depth + 1)

    if kind is list:
        if _is_json(value):
            return value.copy()
        return [inner(item, f"[{index}]") for index, item in enumerate(value)]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(item, f"[{key!r}]") for key, item in value.items()}
        return {"$dict": _pairs(value, path, inner)}
    if (tag := _tag_of(kind)) is not None:
        return {tag: _CODECS[tag][1](value, path, inner)}
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise UnsupportedValueError(path, f"a {name} can't be part of a commit: JSON can't hold it. {_REMEDY}")


def _is_json(items: list[Any]) -> bool:
    """Return whether a list holds just scalars that JSON has. It is fast, since histories are long."""
    kinds = set(map(type, items))
    if kinds <= {str, bool, type(None)}:
        return True
    try:
        return kinds <= {int, float} and all(map(math.isfinite, items))
    except OverflowError:  # an integer that is not a float
        return False


Inner = Callable[[Any, str], Json]
"""Encodes a part of a value, given the part and what to add to the value's path."""


def _pairs(value: Any, path: str, inner: Inner) -> list[Json]:
    return [[inner(key, f" key {key!r}"), inner(item, f"[{key!r}]")] for key, item in value.items()]


def _items(value: Any, path: str, inner: Inner) -> list[Json]:
    return [inner(item, f"[{index}]") for index, item in enumerate(value)]


def _members(value: Any, path: str, inner: Inner) -> list[Json]:
    # A set's own order differs from process to process; commits of equal states should be equal.
    return sorted((inner(item, f" member {item!r}") for item in value), key=repr)


def _numpy(value: Any, path: str, inner: Inner) -> list[Json]:
    array = np.asarray(value)
    if not _PLAIN_DTYPE.fullmatch(array.dtype.str):
        reason = f"a numpy array of dtype {array.dtype} can't be part of a commit. {_REMEDY}"
        raise UnsupportedValueError(path, reason)
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return [array.dtype.str, list(array.shape), data, isinstance(value, np.generic)]


def _enum(value: Any, path: str, inner: Inner) -> list[Json]:
    # Flags of no known bit have no name.
    name = value._name_ if value._name_ is not None else str(value._value_)
    return [_class_name(type(value), path), name]


def _dataclass(value: Any, path: str, inner: Inner) -> list[Json]:
    kind = type(value)
    name = _class_name(kind, path)
    names = [field.name for field in dataclasses.fields(value)]
    try:
        object.__new__(kind)
        values = {key: getattr(value, key) for key in names}
    except (TypeError, AttributeError) as error:  # derived from a built-in type; or a field without a value
        raise UnsupportedValueError(path, f"this dataclass can't be stored: {error}. {_REMEDY}") from error
    fields = {key: inner(item, f".{key}") for key, item in values.items()}
    # What __post_init__ or a cached property put beside the fields: __post_init__ isn't called when decoding.
    beside = getattr(value, "__dict__", {}).items()
    return [name, fields, {key: inner(item, f".{key}") for key, item in beside if key not in fields}]


def _datetime(value: Any, path: str, inner: Inner) -> list[Json]:
    """A datetime or time: ISO format, name of the zone if it has one, fold."""
    if value.tzinfo is None or type(value.tzinfo) is timezone:
        return [value.isoformat(), None, value.fold]
    if type(value.tzinfo) is not zoneinfo.ZoneInfo or value.tzinfo.key is None:
        reason = (
            f"the time zone {value.tzinfo!r} can't be part of a commit. Use zoneinfo.ZoneInfo or timezone."
        )
        raise UnsupportedValueError(path, reason)
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo.key, value.fold]


def _tag_of(kind: type) -> str | None:
    """Return the tag for values of a type; None if a commit can't hold them."""
    if kind in _TAGS:
        return _TAGS[kind]
    # In this order: np.float64 is a float as well, an IntEnum an int.
    if issubclass(kind, np.generic):
        return "$numpy"
    if issubclass(kind, enum.Enum):
        return "$enum"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return "$namedtuple"
    return "$dataclass" if dataclasses.is_dataclass(kind) else None


def _class_name(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_or_none(name) is not kind:
        reason = f"the class {name} can't be found by its name. Define it at the top level of a module."
        raise UnsupportedValueError(path, reason)
    return name


def _class_or_none(name: str) -> Any:
    """Return the class ``module:Outer.Inner`` if its module is imported, else None; run none of its code."""
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        # Read the dictionaries themselves: an attribute of a lazy module or of a metaclass could run code.
        if issubclass(type(found), types.ModuleType):
            found = object.__getattribute__(found, "__dict__").get(part)
        elif issubclass(type(found), type):
            found = type.__getattribute__(found, "__dict__").get(part)
        else:
            return None
    return found if isinstance(found, type) else None


def _find_class(name: str, fits: Callable[[type], bool]) -> Any:
    kind = _class_or_none(name)
    if kind is None or not fits(kind):
        raise ValueError(f"this program lacks the class {name}; import or define it before resuming")
    return kind


def decode(value: Json, resolve: Resolve | None = None) -> Any:
    """Turn the outcome of `encode` back into the value; ``resolve`` is the counterpart of ``leaf``."""
    try:
        return _decode(value, resolve)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def _decode(value: Json, resolve: Resolve | None) -> Any:
    if isinstance(value, list):
        return [_decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, resolve) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"a malformed {tag}: there is more than the tag")
    try:
        if tag in _CODECS:
            return _CODECS[tag][2](value[tag], lambda item: _decode(item, resolve))
        if resolve is not None:
            return resolve(tag, value[tag])
    except (LookupError, TypeError, ArithmeticError, AttributeError, OSError, ImportError) as error:
        raise ValueError(f"a malformed {tag}: {error!r}") from error
    raise ValueError(f"an unknown kind of value, {tag}")


Decode = Callable[[Json], Any]


def _unpack_list(payload: Any, inner: Decode) -> list[Any]:
    if not isinstance(payload, list):
        raise TypeError(f"{payload!r} is not a list")
    return [inner(item) for item in payload]


def _unpack_pairs(payload: Any, inner: Decode) -> list[tuple[Any, Any]]:
    return [(inner(key), inner(item)) for key, item in payload]


def _unpack_bytes(payload: Any) -> bytes:
    return base64.b64decode(payload, validate=True)


def _unpack_numpy(payload: Any, inner: Decode) -> Any:
    name, shape, data, scalar = payload
    if not _PLAIN_DTYPE.fullmatch(name):
        raise ValueError(f"the dtype {name} is not plain")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{shape} is not a shape")
    dtype, content, count = np.dtype(name), _unpack_bytes(data), math.prod(shape)
    # Checked before an array is made: copying one of a billion items of no bytes takes gigabytes.
    if count * dtype.itemsize != len(content) or (count > 1 and dtype.itemsize == 0):
        raise ValueError(f"{len(content)} bytes do not fill the shape {shape}")
    # Not frombuffer: an empty string has items of no bytes, which it refuses.
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, content).copy()
    return array[()] if scalar else array


def _unpack_enum(payload: Any, inner: Decode) -> Any:
    kind_name, name = payload
    kind = _find_class(kind_name, lambda kind: issubclass(kind, enum.Enum))
    members = kind.__members__
    if name in members or not issubclass(kind, enum.Flag):
        return members[name]
    # Flags together are named after their parts, with a number for unknown bits: "READ|WRITE", "READ|8", "0".
    parts = (members[part] if part in members else kind(int(part)) for part in name.split("|"))
    return functools.reduce(operator.or_, parts)


def _unpack_dataclass(payload: Any, inner: Decode) -> Any:
    name, values, others = payload
    kind = _find_class(name, dataclasses.is_dataclass)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := values.keys() - fields.keys():
        raise ValueError(f"the class {name} has no field '{min(unknown)}' any more, which the commit has")
    made = object.__new__(kind)
    for key, field in fields.items():
        if key not in values and field.default is dataclasses.MISSING:
            raise ValueError(
                f"the class {name} has a field '{key}', which the commit lacks; give it a default"
            )
        object.__setattr__(made, key, inner(values[key]) if key in values else field.default)
    for key, item in others.items():
        made.__dict__[key] = inner(item)
    return made


def _unpack_named_tuple(payload: Any, inner: Decode) -> Any:
    name, values = payload
    kind = _find_class(name, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"))
    if len(values) != len(kind._fields):
        raise ValueError(f"the named tuple {name} has {len(kind._fields)} fields, the commit {len(values)}")
    return tuple.__new__(kind, _unpack_list(values, inner))


def _unpack_datetime(kind: Any, payload: Any) -> Any:
    text, zone, fold = payload
    made = kind.fromisoformat(text).replace(fold=fold)
    return made if zone is None else made.replace(tzinfo=zoneinfo.ZoneInfo(zone))


# For each tag: the type whose values it stands for (itself: a subclass could hold more, and could not be made
# again), the function that encodes them, and the one that decodes them.
_CODECS: dict[str, tuple[type | None, Any, Callable[[Any, Decode], Any]]] = {
    "$int": (None, None, lambda p, _: int(p, 16)),
    "$float": (None, None, lambda p, _: float(p)),
    "$dict": (None, _pairs, lambda p, inner: dict(_unpack_pairs(p, inner))),
    "$enum": (None, _enum, _unpack_enum),
    "$namedtuple": (
        None,
        lambda v, path, inner: [_class_name(type(v), path), _items(v, path, inner)],
        _unpack_named_tuple,
    ),
    "$dataclass": (None, _dataclass, _unpack_dataclass),
    "$numpy": (np.ndarray, _numpy, _unpack_numpy),
    "$tuple": (tuple, _items, lambda p, inner: tuple(_unpack_list(p, inner))),
    "$set": (set, _members, lambda p, inner: set(_unpack_list(p, inner))),
    "$frozenset": (frozenset, _members, lambda p, inner: frozenset(_unpack_list(p, inner))),
    "$deque": (
        deque,
        lambda v, path, inner: [_items(v, path, inner), v.maxlen],
        lambda p, inner: deque(_unpack_list(p[0], inner), p[1]),
    ),
    "$ordereddict": (OrderedDict, _pairs, lambda p, inner: OrderedDict(_unpack_pairs(p, inner))),
    "$counter": (Counter, _pairs, lambda p, inner: Counter(dict(_unpack_pairs(p, inner)))),
    "$bytes": (bytes, lambda v, *_: base64.b64encode(v).decode(), lambda p, _: _unpack_bytes(p)),
    "$complex": (
        complex,
        lambda v, *_: [repr(v.real), repr(v.imag)],
        lambda p, _: complex(float(p[0]), float(p[1])),
    ),
    "$path": (type(Path()), lambda v, *_: str(v), lambda p, _: Path(p)),
    "$purepath": (PurePosixPath, lambda v, *_: str(v), lambda p, _: PurePosixPath(p)),
    "$datetime": (datetime, _datetime, lambda p, _: _unpack_datetime(datetime, p)),
    "$time": (time, _datetime, lambda p, _: _unpack_datetime(time, p)),
    "$date": (date, lambda v, *_: v.isoformat(), lambda p, _: date.fromisoformat(p)),
    "$timedelta": (timedelta, lambda v, *_: [v.days, v.seconds, v.microseconds], lambda p, _: timedelta(*p)),
}
_TAGS = {kind: tag for tag, (kind, _, _) in _CODECS.items() if kind is not None}
