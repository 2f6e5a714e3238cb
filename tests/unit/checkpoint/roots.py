"""Checkpoint roots, stores and snapshots for tests."""

from __future__ import annotations

import contextlib
import functools
import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
import numpy as np

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Arena, TensorSpec, digest, plan
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.checkpoint.store import Store
from tests.fakes.clock import FakeClock


class Recorder:
    """Events that are only noted, as pairs of a kind and its facts."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, message: str | None = None, *, level: int = 0, **facts: Any) -> None:
        self.noted.append((kind, {"message": message, "level": level, **facts}))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [facts for found, facts in self.noted if found == kind]


class Killed(BaseException):
    """The process is killed; nothing in it can catch this."""


class Wrapped:
    """A storage whose mutating calls can be made to fail."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.calls: list[str] = []  # the mutating calls that were begun, as ``verb path``
        self.plan: list[Exception | None] = []  # the next calls raise these, in order; None lets one through
        self.kill_at: int | None = None  # the number, from 0, of the call in which the process is killed
        self.after = False  # the process is killed at the end of that call, not at its start

    def __getattr__(self, name: str) -> Any:
        if name in ("write", "publish", "create", "remove", "delete"):
            return functools.partial(self.mutate, name)
        return getattr(self.inner, name)

    def mutate(self, verb: str, path: str, *args: Any) -> Any:
        number = len(self.calls)
        self.calls.append(f"{verb} {path}")
        if number == self.kill_at and not self.after:
            self._half_do(verb, path, *args)
            raise Killed
        if self.plan and (error := self.plan.pop(0)) is not None:
            raise error
        result = getattr(self.inner, verb)(path, *args)
        if number == self.kill_at:
            raise Killed
        return result

    def _half_do(self, verb: str, path: str, *args: Any) -> None:
        if verb == "write":
            self.inner.write(path, args[0][: len(args[0]) // 2])
        if verb == "delete":
            for name in self.inner.names(path)[:1]:
                self.inner.remove(f"{path}/{name}")


@contextlib.contextmanager
def memory_root() -> Iterator[Storage]:
    path = f"/{uuid.uuid4().hex}"
    try:
        yield open_storage(f"memory:/{path}/root")
    finally:
        with contextlib.suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(path, recursive=True)


CODES = {
    np.dtype(code): name
    for name, code in zip(
        ["BOOL", "U8", "I8", "U16", "I16", "F16", "U32", "I32", "F32", "U64", "I64", "F64", "C64"],
        ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"],
        strict=True,
    )
}
"""numpy's dtypes: names of safetensors'."""


def arena_of(tensors: Mapping[str, Any]) -> Arena:
    """The file of some arrays."""
    arena = Arena(
        plan([TensorSpec(name, CODES[array.dtype], array.shape) for name, array in tensors.items()])
    )
    for name, array in tensors.items():
        arena.bytes_of(name)[:] = np.frombuffer(array.tobytes(), np.uint8)
    return arena


def make_store(storage: Any, *, job: str = "job", keep: int = 3, clock: FakeClock | None = None) -> Store:
    return Store(storage, keep=keep, job=job, host="host", events=Recorder(), clock=clock or FakeClock())


def make_snapshot(generation: int, commit: int, *, finished: bool = False) -> Snapshot:
    """A commit whose every byte tells which commit it is of."""
    first = np.float32(commit + 1000 * generation)
    arenas = {
        name: arena_of({"weight": np.arange(count, dtype="f4") + first, "empty": np.zeros(0, "u1")})
        for name, count in (("model", 1000), ("optimizer", 7))
    }
    return Snapshot(
        id=CommitId(generation, commit),
        arenas=arenas,
        state={"attributes": {"z": commit, "a": {"$tuple": [generation]}}},
        world_size=2,
        versions={"torch": "2.13.0"},
        finished=finished,
    )


def assert_is(found: Snapshot | None, expected: Snapshot) -> None:
    """The very commit, bit for bit."""
    assert found is not None
    assert (found.id, found.state, found.world_size) == (expected.id, expected.state, expected.world_size)
    assert (found.versions, found.finished) == (expected.versions, expected.finished)
    assert list(found.state["attributes"]) == list(expected.state["attributes"])
    assert found.arenas.keys() == expected.arenas.keys()
    for name, arena in expected.arenas.items():
        assert found.arenas[name].layout == arena.layout
        assert found.arenas[name].buffer.tobytes() == arena.buffer.tobytes()


def signed(fields: dict[str, Any]) -> bytes:
    """A manifest of any fields with the digest that goes with them."""
    canonical = json.dumps(fields, separators=(",", ":")).encode()
    return json.dumps({**fields, "digest": digest(canonical)}).encode()


def content(storage: Storage, folder: str = "") -> dict[str, bytes]:
    """Every file of a root."""
    found = {}
    for name in storage.names(folder):
        path = f"{folder}/{name}" if folder else name
        if storage.size(path) is None:
            found.update(content(storage, path))
        else:
            found[path] = storage.read(path)
    return found


def flip(storage: Storage, path: str) -> None:
    """Flip one bit of a file."""
    data = bytearray(storage.read(path))
    data[-1] ^= 0x80
    storage.publish(path, bytes(data))
