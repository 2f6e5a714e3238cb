"""The contents of the golden checkpoint of format 1.

It was written once, by ``golden.write(Path("tests/golden/format-1"))``, and must keep loading. Don't write it
anew: a new format gets a folder of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import zoneinfo
from typing import Any, NamedTuple

import numpy as np

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.values import encode
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import arena_of, make_store


class Phase(enum.Enum):
    TRAIN = "train"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Schedule:
    rate: float
    steps: list[int]


ID = CommitId(1, 120)
TENSORS: dict[str, dict[str, tuple[str, Any]]] = {
    "model": {
        "layer.weight": ("F32", np.arange(6, dtype="<f4").reshape(2, 3) / 4),
        "layer.bias": ("F64", np.array([1.5, -0.0, math.inf], dtype="<f8")),
        "step": ("I64", np.array(120, dtype="<i8")),
        "mask": ("BOOL", np.array([True, False, True])),
        "nothing": ("F16", np.zeros((0, 4), dtype="<f2")),
    },
    "optimizer": {"0.exp_avg": ("F32", np.linspace(-1, 1, 5, dtype="<f4"))},
}
OBJECTS: dict[str, Any] = {
    "z first": 1,
    "a later": [None, True, 2**70, 0.1, -0.0, "ü"],
    "int": 10**1000,
    "infinite": math.inf,
    "complex": 1 - 2j,
    "bytes": b"\x00\xff",
    "tuple": (1, (2,)),
    "set": {1, "a"},
    "frozenset": frozenset({2}),
    "deque": collections.deque([1, 2], maxlen=2),
    "keys": {1: "one", (2, 3): "pair", "$tag": "text"},
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("aab"),
    "array": np.arange(4, dtype=">i2").reshape(2, 2),
    "scalar": np.float32(0.5),
    "moment": np.datetime64("2024-01-02T03:04:05", "s"),
    "path": pathlib.Path("/data/run"),
    "pure path": pathlib.PurePosixPath("a/b"),
    "date": datetime.date(2024, 2, 29),
    "datetime": datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "time": datetime.time(1, 2, 3, 4, tzinfo=datetime.UTC),
    "timedelta": datetime.timedelta(days=-1, seconds=2, microseconds=3),
    "enum": Phase.TRAIN,
    "flags": Access.READ | Access.WRITE,
    "named": Point(1, 2),
    "dataclass": Schedule(0.1, [1, 2]),
}
SAMPLER = {"epoch": 2, "processed_num": 64, "length": 1000, "shuffle": True, "seed": 7}


def snapshot() -> Snapshot:
    arenas = {
        name: arena_of({key: array for key, (_, array) in tensors.items()})
        for name, tensors in TENSORS.items()
    }
    state = {
        "attributes": {"objects": encode(OBJECTS, "state.objects")},
        "samplers": {"sampler": SAMPLER},
        "random": {"seed": 42, "states": {}},
    }
    return Snapshot(
        ID, arenas, state, 4, {"torch": "2.13.0", "horovod": "0.28.1", "hvdrecover": "0.1.0"}, True
    )


def same(a: Any, b: Any) -> bool:
    """Equality of values and types, all the way down; NaN equals itself, -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return repr(a.real) == repr(b.real) and repr(a.imag) == repr(b.imag)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(
            same(x, y) for one, other in pairs for x, y in zip(one, other, strict=True)
        )
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return same(
            [getattr(a, field.name) for field in dataclasses.fields(a)],
            [getattr(b, field.name) for field in dataclasses.fields(b)],
        )
    return bool(a == b)


def write(folder: pathlib.Path) -> None:
    store = make_store(LocalStorage(folder.absolute()), job="golden", clock=FakeClock(start=1700000000.25))
    store.claim_next()
    store.write(snapshot(), rank=0)
