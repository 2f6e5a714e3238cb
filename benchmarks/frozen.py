"""Commits of which most did not change since the last one, to an object store, beside sending all of each."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import fsspec
import numpy as np

from benchmarks.link import Link, link
from benchmarks.measure import by_turns
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import TensorSpec, plan
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.store import Store
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.events import Events
from tests.contracts.object_stores import BUCKET, seaweedfs

_WIDTHS = {"full": 2048, "small": 1024}
_LAYERS, _TRAINED = 20, 2
_LINKS = {"over loopback": None, "over 200 Mbit/s": 25e6}  # bytes per second
_STORE = "seaweedfs"


class _Take(NamedTuple):
    """One commit: seconds until it was durable, and the bytes that were sent for that."""

    seconds: float
    nbytes: float


class FineTuning:
    """A network of which a tenth is trained, and its commits.

    Args:
        width: features in and out of each layer.
        moments: how many numbers the optimizer has for each that is trained.
    """

    def __init__(self, width: int, moments: int) -> None:
        trained = range(_LAYERS - _TRAINED, _LAYERS)
        weights = [TensorSpec(f"{number}.weight", "F32", (width, width)) for number in range(_LAYERS)]
        kept = [TensorSpec(f"{n}.{m}", "F32", (width, width)) for n in trained for m in range(moments)]
        self._arenas = {name: Arena(plan(specs)) for name, specs in (("model", weights), ("optimizer", kept))}
        self._changing = [self._arenas["model"].bytes_of(f"{number}.weight") for number in trained]
        self._changing += [self._arenas["optimizer"].bytes_of(spec.name) for spec in kept]
        self._random, self._commit = np.random.default_rng(0), 0
        for arena in self._arenas.values():
            for spec in arena.layout.specs:
                self._fill(arena.bytes_of(spec.name))

    @property
    def title(self) -> str:
        """Its name in tables."""
        nbytes = sum(len(arena.buffer) for arena in self._arenas.values())
        changing = sum(len(each) for each in self._changing)
        return f"{nbytes / 1e6:.0f} MB, of which {changing / nbytes:.0%} changed"

    def commit(self) -> Snapshot:
        """Train a step, and make a commit of it."""
        self._commit += 1
        for each in self._changing:
            self._fill(each)
        return Snapshot(CommitId(1, self._commit), self._arenas, {"attributes": {}}, 1, {})

    def _fill(self, memory: np.ndarray) -> None:  # type: ignore[type-arg]
        memory.view(np.uint64)[:] = self._random.integers(0, 2**63, len(memory) // 8, dtype=np.uint64)


def measure(setting: Setting) -> list[Row]:
    """Time and bytes that are sent: nine tenths of SGD's state stay, three quarters of AdamW's."""
    rows = []
    for where, rate in _LINKS.items():
        for optimizer, moments in (("SGD", 0), ("AdamW", 2)):
            training = FineTuning(_WIDTHS[setting.size], moments)
            with _linked(setting.folder / f"{optimizer}-{rate}", rate) as there:
                ours, theirs = _takes(setting, training, there)
            goal = Goal(0.2, 0.15) if optimizer == "SGD" else None
            what = f"a fine-tuning with {optimizer}, 9 of 10 layers frozen, {_STORE} {where}: "
            for name, unit, values in (
                ("until durable", "s", ([each.seconds for each in takes] for takes in (ours, theirs))),
                ("sent", "MB", ([each.nbytes / 1e6 for each in takes] for takes in (ours, theirs))),
            ):
                mine, others = values
                rows.append(Row("stores", what + name, training.title, unit, mine, "all sent", others, goal))
    return rows


@contextmanager
def _linked(folder: Path, rate: float | None) -> Iterator[Link]:
    """A store behind a link, which fsspec's configuration leads to."""
    folder.mkdir()
    server = seaweedfs(folder)
    try:
        server.start()
        port = int(server.options["endpoint_url"].rpartition(":")[2])
        with link(port, rate) as there:
            options = {**server.options, "endpoint_url": f"http://127.0.0.1:{there.port}"}
            fsspec.config.conf["s3"] = options
            yield there
    finally:
        server.stop()


def _takes(setting: Setting, training: FineTuning, there: Link) -> tuple[list[_Take], list[_Take]]:
    mine = _store()
    for _ in range(2):  # what a process sends first is sent whole
        mine.write(training.commit(), 0)

    def take(store: Store) -> _Take:
        snapshot, before, started, found = training.commit(), there.sent(), time.perf_counter(), list[_Take]()

        def durable() -> None:
            found.append(_Take(time.perf_counter() - started, there.sent() - before))

        store.write(snapshot, 0, durable)
        return found[0]

    ours, theirs = by_turns(setting.rounds(3), [lambda: take(mine), lambda: take(_store())])
    return ours, theirs


def _store() -> Store:
    """A root of its own, of which nothing was written yet."""
    storage = open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    events = Events(None, "benchmark")
    return Store(storage, keep=2, job=uuid.uuid4().hex, host="benchmark", events=events, clock=SYSTEM_CLOCK)
