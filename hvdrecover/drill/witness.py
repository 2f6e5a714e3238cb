"""The witness: records commits, steps and batches of a training process, and makes it fail on demand.

``HVDRECOVER_INSTRUMENTS`` names this module in the processes of a drill. The layers below do not know the
drill. A witness appends lines of JSON to ``FOLDER/witness/HOST-PID.jsonl``; `hvdrecover.drill.records.Line`
lists their fields.

To make rank R fail at its next step, the drill writes ``loop``, ``out-of-memory`` or ``script-error`` to
``FOLDER/orders/R``.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import xxhash

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.store import Store
from hvdrecover.data.order import SampleOrder
from hvdrecover.events import Events
from hvdrecover.state.hooks import Agreement, Context, Hook

_PIECE = 1 << 26  # bytes that a process takes at a time until it has no memory left


def observers(context: Context) -> tuple[Hook, ...]:
    return (Witness(context),)


class Witness(Hook):
    def __init__(self, context: Context) -> None:
        assert context.config.drill is not None
        self._folder = context.config.drill
        self._context = context
        self._contents = context.contents
        self._world = context.world
        self._descriptor: int | None = None
        self._at = (0, 0)
        self._steps = self._batches = 0
        self._contents.on_record.append(self.recorded)
        self._context.framework.report("steps", self)

    def agreed(self, agreement: Agreement) -> None:
        """Record a commit to resume from; store an initial state, so that other runs can begin with it."""
        snapshot, source = agreement.snapshot, agreement.source
        if source == "initial" and self._world.rank() == 0:
            self._store(snapshot)
        self._stand_at(snapshot)
        self._write("agreed", source=source)

    def step_begins(self) -> None:
        self._steps += 1
        self._write("step", number=self._steps)
        self._follow_order()

    def recorded(self, order: SampleOrder, count: int) -> None:
        self._batches += 1
        name = next((name for name, each in self._contents.orders.items() if each is order), "")
        samples = order.remaining()[: count * order.size].tolist()
        self._write("batch", sampler=name, epoch=order.epoch, at=order.done, samples=samples)
        self._follow_order()

    def captured(self, snapshot: Snapshot) -> None:
        facts: dict[str, Any] = {
            "made": snapshot.id.commit,
            "steps": self._steps,
            "batches": self._batches,
            "tensors": {name: _digests(arena) for name, arena in snapshot.arenas.items()},
            "values": snapshot.state["attributes"],
            "buffers": {name: sorted(names) for name, names in self._contents.rank_local().items()},
            "virtual": self._context.ranks.virtual,
        }
        if self._world.rank() == 0:
            facts["samplers"] = snapshot.state["samplers"]
        self._write("commit", **facts)
        self._stand_at(snapshot)

    def _stand_at(self, snapshot: Snapshot) -> None:
        self._at = (snapshot.id.generation, snapshot.id.commit)
        self._steps = self._batches = 0

    def _store(self, snapshot: Snapshot) -> None:
        storage, host = open_storage(os.fspath(self._folder / "initial")), self._context.config.host
        clock = self._context.clock
        store = Store(storage, keep=1, job="drill", host=host, events=Events(None, host, clock), clock=clock)
        store.claims.take_after(snapshot.id.generation - 1)
        store.write(snapshot, 0)

    def _write(self, what: str, **facts: Any) -> None:
        (generation, commit), now = self._at, self._context.clock.monotonic()
        place = {"rank": self._world.rank(), "size": self._world.size()}
        line = {"what": what, "time": now, **place, "generation": generation, "commit": commit, **facts}
        if self._descriptor is None:
            path = self._folder / "witness" / f"{self._context.config.host}-{os.getpid()}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(self._descriptor, f"{json.dumps(line)}\n".encode())

    def _follow_order(self) -> None:
        """Fail as the drill has asked this rank to, once."""
        order = self._folder / "orders" / str(self._world.rank())
        try:
            action = order.read_text()
            order.unlink()  # first, or the next process of this rank would fail, too
        except FileNotFoundError:
            return
        fail(action)


def fail(action: str) -> None:
    """Loop forever, run out of memory, or raise an error as a training script might."""
    if action == "script-error":
        raise RuntimeError("an error in the training script, raised by hvdrecover drill")
    taken = []
    if action == "out-of-memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + 4 * _PIECE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    while True:
        if action == "out-of-memory":
            taken.append(b"x" * _PIECE)


def _digests(arena: Arena) -> dict[str, str]:
    specs = arena.layout.specs
    return {spec.name: xxhash.xxh3_64_hexdigest(arena.bytes_of(spec.name).data) for spec in specs}
