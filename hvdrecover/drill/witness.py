"""The witness of a drill: its reports from a training process, and what it has the process do.

A witness writes lines of JSON to ``FOLDER/witness/HOST-PID.jsonl``. Each has ``what``, ``time`` (seconds of
the monotonic clock, which all processes of a host share), ``rank``, ``size``, and ``generation`` and
``commit`` of the commit that it came after:

=========== =============================================================================================
``agreed``  ``source``; the ranks have agreed on a commit to resume from
``changed`` ``tensors`` (attribute to names), ``values`` (attribute to before and after): what had changed
            since then before the first step, where that can be told
``step``    ``number`` since the commit, ``inputs``: digest of what models were given, or null
``batch``   ``sampler``, ``epoch``, ``at``, ``samples``: all ranks together are about to have done these,
            from this place of the epoch's order on; ``inputs``: digest of what this rank's data set
            dealt there, or null
``commit``  ``made``: its number; ``steps``, ``batches`` since the last one; ``loss``: mean of those that
            this rank was told since then, or null; ``tensors`` (attribute to name to digest), ``values``
            (attribute to what it is apart from tensors), ``buffers`` (attribute of a model or the like to
            names of tensors that each rank has its own of), ``virtual``: number of virtual ranks, or null;
            on rank 0 ``samplers``
=========== =============================================================================================
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.store import Store
from hvdrecover.checkpoint.values import Json
from hvdrecover.data.order import SampleOrder
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.elastic.companions import Observer
from hvdrecover.elastic.context import Context
from hvdrecover.events import Events

_PIECE = 1 << 26  # bytes that a hungry process takes at a time

Digests = dict[str, dict[str, str]]


class Witness(Observer):
    """The witness in one process.

    Args:
        context: the state's surroundings; its settings name the drill's folder, and the host.

    Attributes:
        agreements: how often this process has agreed with the others.
    """

    def __init__(self, context: Context) -> None:
        assert context.config.drill is not None
        self._folder = context.config.drill
        self._context = context
        self._config = context.config
        self._contents = context.contents
        self._world = context.world
        self._clock = context.clock
        self._descriptor: int | None = None
        self.agreements = 0
        self._at = (0, 0)
        self._steps = self._batches = 0
        self._losses: list[float] = []
        self._adopted: tuple[Digests, dict[str, Json]] | None = None

    def attach(self) -> None:
        """Have data sets and the framework report batches and steps."""
        self._contents.on_record.append(self.recorded)
        self._context.framework.report_steps(self._contents, self)

    def agreed(self, agreement: Agreement) -> None:
        """The ranks have agreed on a commit; an initial one is kept for other runs to begin with."""
        snapshot, source = agreement.snapshot, agreement.source
        if source == "initial" and self._world.rank() == 0:
            self._keep(snapshot)
        self.agreements += 1
        self._stand_at(snapshot)
        self._adopted = self._present()
        self._write("agreed", source=source)

    def step_begins(self, inputs: str | None = None) -> None:
        """An optimizer is about to step."""
        if self._adopted is not None:
            tensors, values = self._adopted
            self._adopted = None
            now, present = self._present()
            changed = {name: _differ(tensors.get(name, {}), now.get(name, {})) for name in {**tensors, **now}}
            others = {
                name: [values.get(name), value]
                for name, value in present.items()
                if values.get(name) != value
            }
            self._write("changed", tensors={k: v for k, v in changed.items() if v}, values=others)
        self._steps += 1
        self._write("step", number=self._steps, inputs=inputs)
        self._obey()

    def recorded(self, order: SampleOrder, count: int, inputs: str | None = None) -> None:
        """A batch is about to be recorded as done."""
        self._batches += 1
        name = next((name for name, each in self._contents.orders.items() if each is order), "")
        samples = order.remaining()[: count * order.size].tolist()
        self._write("batch", sampler=name, epoch=order.epoch, at=order.done, samples=samples, inputs=inputs)
        self._obey()

    def observed(self, values: Mapping[str, Any]) -> None:
        """Take a loss that the script reports."""
        if "loss" in values:
            self._losses.append(float(values["loss"]))

    def captured(self, snapshot: Snapshot) -> None:
        """A commit has been copied, and steps are counted from it from now on."""
        facts: dict[str, Any] = {
            "made": snapshot.id.commit,
            "steps": self._steps,
            "batches": self._batches,
            "loss": statistics.fmean(self._losses) if self._losses else None,
            "tensors": {name: _digests(arena) for name, arena in snapshot.arenas.items()},
            "values": snapshot.state["attributes"],
            "buffers": {name: sorted(names) for name, names in self._contents.rank_local().items()},
            "virtual": self._context.ranks.virtual,
        }
        if self._world.rank() == 0:
            facts["samplers"] = snapshot.state["samplers"]
        self._write("commit", **facts)
        self._stand_at(snapshot)

    # -- inside ----------------------------------------------------------------------------------------

    def _stand_at(self, snapshot: Snapshot) -> None:
        self._at = (snapshot.id.generation, snapshot.id.commit)
        self._steps = self._batches = 0
        self._losses = []

    def _present(self) -> tuple[Digests, dict[str, Json]]:
        present = self._contents.take_apart({})  # without what is each rank's own
        arenas = self._contents.copy(present, {})
        tensors = {name: _digests(arena) for name, arena in arenas.items()}
        return tensors, present.state()["attributes"]

    def _keep(self, snapshot: Snapshot) -> None:
        settings = Checkpoint(os.fspath(self._folder / "initial"))
        storage = open_storage(settings.url)
        events = Events(None, self._config.host, self._clock)
        store = Store(storage, keep=1, job="drill", host=self._config.host, events=events, clock=self._clock)
        store.claims.take_after(snapshot.id.generation - 1)
        store.write(snapshot, 0)

    def _write(self, what: str, **facts: Any) -> None:
        generation, commit = self._at
        line = {
            "what": what,
            "time": self._clock.monotonic(),
            "rank": self._world.rank(),
            "size": self._world.size(),
            "generation": generation,
            "commit": commit,
            **facts,
        }
        if self._descriptor is None:
            path = self._folder / "witness" / f"{self._config.host}-{os.getpid()}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(self._descriptor, f"{json.dumps(line)}\n".encode())

    def _obey(self) -> None:
        """Do what the drill has asked of this rank, once."""
        order = self._folder / "orders" / str(self._world.rank())
        try:
            words = order.read_text().split()
            order.unlink()
        except FileNotFoundError:
            return
        _ACTIONS[words[0]](*words[1:])


def _digests(arena: Arena) -> dict[str, str]:
    return {
        spec.name: xxhash.xxh3_64_hexdigest(arena.bytes_of(spec.name).data) for spec in arena.layout.specs
    }


def _differ(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _loop() -> None:
    while True:
        pass


def _segfault() -> None:
    ctypes.string_at(0)


def _hunger(cgroup: str = "") -> None:
    """Take memory until there is none: in a control group with a limit, else of what a process may have."""
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    else:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + 4 * _PIECE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    taken = []
    while True:
        taken.append(b"x" * _PIECE)


_ACTIONS: dict[str, Callable[..., None]] = {"loop": _loop, "segfault": _segfault, "hunger": _hunger}
