"""Sending one rank's commit to all others."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from hvdrecover import error_kinds
from hvdrecover.checkpoint.arena import Arena, allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import Layout, parse
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.agreement.missing_pieces import Need, fill
from hvdrecover.elastic.interfaces import World
from hvdrecover.errors import StoppedError

Source = Literal["memory", "near", "durable", "initial"]

Base = Callable[[Mapping[str, Layout]], Mapping[str, Arena]]

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Agreement:
    """The state that all ranks resume from.

    Attributes:
        snapshot: the commit, the same on all ranks.
        source: where it came from.
        job: identity of the job.
        loaded: the name of the durable commit that it came from; empty if it came from a memory.
    """

    snapshot: Snapshot
    source: Source
    job: str
    loaded: str = ""


def send(world: World, root: int, agreement: Agreement) -> None:
    """Hand the root's commit to the other ranks.

    Those that turn out to hold the very bytes keep what they have; if all do, only its description is sent.
    """
    snapshot = agreement.snapshot
    held = digests(snapshot) if agreement.source in ("memory", "near") and world.size() > 1 else {}
    header = {
        "id": [snapshot.id.generation, snapshot.id.commit],
        "source": agreement.source,
        "job": agreement.job,
        "loaded": agreement.loaded,
        "state": snapshot.state,
        "world_size": snapshot.world_size,
        "versions": snapshot.versions,
        "finished": snapshot.finished,
        "files": {
            name: [arena.layout.nbytes, base64.b64encode(arena.layout.header).decode()]
            for name, arena in snapshot.arenas.items()
        },
        "digests": held,
    }
    _broadcast_json(world, root, header)
    fill(world, root, snapshot.arenas, Need.NOTHING)


def digests(snapshot: Snapshot) -> dict[str, str]:
    """Return the digests of a commit's files, by attribute name."""
    return snapshot.digested().digests or {}


def send_failure(world: World, root: int, error: BaseException) -> None:
    """Tell the other ranks that the root has nothing to send."""
    _broadcast_json(world, root, failure(error))


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as the other ranks get it."""
    kind = error_kinds.kinds(error)[:1] or [type(error).__name__]
    return {"error": f"{type(error).__name__}: {error}", "kind": kind[0]}


def stopped(root: int, failure: dict[str, Any]) -> StoppedError:
    """Return the error of the ranks that the root has sent its `failure`."""
    return StoppedError(f"rank {root} has no state to resume from. {failure['error']}", failure["kind"])


def receive(
    world: World,
    root: int,
    held: Mapping[str, Arena] = _NONE,
    mine: Mapping[str, str] = _NONE,
    base: Base = lambda layouts: {},
) -> Agreement:
    """Take the root's commit, into memory of its own: what this rank holds stays whole until all has come.

    Args:
        world: the ranks.
        root: the rank that sends.
        held: the files of a commit by attribute name, if they may be those that are sent. If their bytes are,
            their memory is used, and nothing is copied.
        mine: the digests of these files.
        base: returns memory for files of these layouts, in which parts may be those that are sent; empty if
            there is none.

    Raises:
        StoppedError: the root could not load a commit.
    """
    header = _broadcast_json(world, root, None)
    if "error" in header:
        raise stopped(root, header)
    lacking = mine != header["digests"] or not mine
    files = {name: parse(base64.b64decode(text), size) for name, (size, text) in header["files"].items()}
    old = held if not lacking else base(files) if header["digests"] else {}
    need = Need.NOTHING if not lacking else Need.PARTS if old else Need.ALL
    arenas = {name: old[name] if old else Arena(layout) for name, layout in files.items()}
    fill(world, root, arenas, need)
    snapshot = Snapshot(
        id=CommitId(*header["id"]),
        arenas=arenas,
        state=header["state"],
        world_size=header["world_size"],
        versions=header["versions"],
        finished=header["finished"],
        digests=None if lacking else dict(mine),
    )
    return Agreement(snapshot, header["source"], header["job"], header["loaded"])


def _broadcast_json(world: World, root: int, value: dict[str, Any] | None) -> dict[str, Any]:
    text = np.frombuffer(json.dumps(value, default=dict).encode(), dtype=np.uint8).copy()
    length = np.array([len(text)], dtype=np.int64).view(np.uint8)
    world.broadcast(length, root, "hvdrecover.header.length")
    if world.rank() != root:
        text = allocate(int(length.view(np.int64)[0]))
    world.broadcast(text, root, "hvdrecover.header")
    received: dict[str, Any] = json.loads(text.tobytes())
    return received
