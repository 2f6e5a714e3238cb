"""How ranks that have met agree on one commit: who has the newest, and handing it to all."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdrecover.checkpoint.arena import Arena, Bytes, allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import parse
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.interfaces import World
from hvdrecover.errors import RecoveryError

Source = Literal["memory", "durable", "initial"]

_PIECE = 1 << 26  # bytes in one broadcast


@dataclass(frozen=True)
class Election:
    """Whose memory the job goes on from.

    Attributes:
        root: the rank that sends; rank 0 if nobody's memory holds a commit.
        newest: the newest commit in anybody's memory, or None.
    """

    root: int
    newest: CommitId | None


@dataclass(frozen=True)
class Agreement:
    """What all ranks go on from.

    Attributes:
        snapshot: the commit, the same on all ranks.
        source: where it came from.
        job: identity of the job.
    """

    snapshot: Snapshot
    source: Source
    job: str


def elect(published: Sequence[CommitId]) -> Election:
    """Choose the lowest of the ranks that hold the newest commit.

    Args:
        published: each rank's newest commit in memory; generation 0 stands for none.
    """
    newest = max(published)
    if newest.generation == 0:
        return Election(0, None)
    return Election(list(published).index(newest), newest)


def publish(world: World, mine: CommitId | None) -> Election:
    """Tell the others what this rank's memory holds, and elect the root."""
    own = mine or CommitId(0, 0)
    table = world.allgather([own.generation, own.commit], "hvdrecover.election")
    return elect([CommitId(int(generation), int(commit)) for generation, commit in table])


def send(world: World, root: int, agreement: Agreement) -> None:
    """Hand the root's commit to the other ranks."""
    snapshot = agreement.snapshot
    header = {
        "id": [snapshot.id.generation, snapshot.id.commit],
        "source": agreement.source,
        "job": agreement.job,
        "state": snapshot.state,
        "world_size": snapshot.world_size,
        "versions": snapshot.versions,
        "finished": snapshot.finished,
        "files": {
            name: [arena.layout.nbytes, base64.b64encode(arena.layout.header).decode()]
            for name, arena in snapshot.arenas.items()
        },
    }
    _broadcast_json(world, root, header)
    for arena in snapshot.arenas.values():
        _broadcast_buffer(world, root, arena.buffer)


def send_failure(world: World, root: int, error: BaseException) -> None:
    """Tell the other ranks that the root has nothing to send."""
    _broadcast_json(world, root, {"error": f"{type(error).__name__}: {error}"})


def receive(world: World, root: int) -> Agreement:
    """Take the root's commit, into memory of its own: what this rank holds stays whole until all has come.

    Raises:
        RecoveryError: the root could not load a commit.
    """
    header = _broadcast_json(world, root, None)
    if "error" in header:
        raise RecoveryError(f"rank {root} has no state to go on from. {header['error']}")
    arenas = {}
    for name, (size, text) in header["files"].items():
        arenas[name] = Arena(parse(base64.b64decode(text), size))
        _broadcast_buffer(world, root, arenas[name].buffer)
    snapshot = Snapshot(
        id=CommitId(*header["id"]),
        arenas=arenas,
        state=header["state"],
        world_size=header["world_size"],
        versions=header["versions"],
        finished=header["finished"],
    )
    return Agreement(snapshot, header["source"], header["job"])


def gather_json(world: World, value: Any, name: str) -> list[Any]:
    """Everybody's value, by rank."""
    text = json.dumps(value).encode()
    lengths = world.allgather([len(text)], f"{name}.length")[:, 0]
    padded = text.ljust(-(-int(lengths.max()) // 8) * 8)
    table = world.allgather(np.frombuffer(padded, dtype=np.int64).tolist(), name)
    return [json.loads(row.tobytes()[:length]) for row, length in zip(table, lengths, strict=True)]


def _broadcast_json(world: World, root: int, value: dict[str, Any] | None) -> dict[str, Any]:
    text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy()
    length = np.array([len(text)], dtype=np.int64).view(np.uint8)
    world.broadcast(length, root, "hvdrecover.header.length")
    if world.rank() != root:
        text = allocate(int(length.view(np.int64)[0]))
    world.broadcast(text, root, "hvdrecover.header")
    received: dict[str, Any] = json.loads(text.tobytes())
    return received


def _broadcast_buffer(world: World, root: int, buffer: Bytes) -> None:
    for start in range(0, len(buffer), _PIECE):
        world.broadcast(buffer[start : start + _PIECE], root, f"hvdrecover.snapshot.{len(buffer)}.{start}")
