"""Sending the source rank's commit to all other ranks.

1. The source rank broadcasts a header: the commit's JSON, the headers of its files, and their digests.
2. Ranks that hold the very bytes keep theirs. If all do, nothing more is sent.
3. Else the files are broadcast piece by piece, into memory of the receiver's own: its commit stays whole
   until all has come.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from hvdrecover import error_kinds
from hvdrecover.checkpoint.arena import Arena, allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import parse
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.errors import StoppedError
from hvdrecover.state.adapter import World
from hvdrecover.state.hooks import Agreement

PIECE = 1 << 26  # bytes in one broadcast

_NONE: Mapping[str, Any] = MappingProxyType({})


def send(world: World, root: int, agreement: Agreement) -> None:
    """Send the source rank's commit to the other ranks."""
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
    _broadcast_files(world, root, snapshot.arenas, lacking=False)


def digests(snapshot: Snapshot) -> dict[str, str]:
    """Return the digests of a commit's files, by attribute name."""
    return snapshot.digested().digests or {}


def send_failure(world: World, root: int, error: BaseException) -> None:
    """Tell the other ranks that the source rank has nothing to send."""
    _broadcast_json(world, root, failure(error))


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as the other ranks get it."""
    kind = error_kinds.kinds(error)[:1] or [type(error).__name__]
    return {"error": f"{type(error).__name__}: {error}", "kind": kind[0]}


def stopped(root: int, failure: dict[str, Any]) -> StoppedError:
    """Return the error of the ranks to which rank ``root`` has sent its `failure`."""
    return StoppedError(f"rank {root} has no state to resume from. {failure['error']}", failure["kind"])


def receive(
    world: World, root: int, held: Mapping[str, Arena] = _NONE, mine: Mapping[str, str] = _NONE
) -> Agreement:
    """Receive the source rank's commit.

    Args:
        world: the ranks.
        root: the source rank.
        held: the files of a commit that may be the same, by attribute name. If their bytes are, their memory
            is used, and nothing is copied.
        mine: the digests of these files.

    Raises:
        StoppedError: the source rank could not load a commit.
    """
    header = _broadcast_json(world, root, None)
    if "error" in header:
        raise stopped(root, header)
    lacking = mine != header["digests"] or not mine
    arenas = {
        name: Arena(parse(base64.b64decode(text), size)) if lacking else held[name]
        for name, (size, text) in header["files"].items()
    }
    _broadcast_files(world, root, arenas, lacking=lacking)
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


def _broadcast_files(world: World, root: int, arenas: Mapping[str, Arena], *, lacking: bool) -> None:
    """Fill the memory of the ranks that lack the files; the arenas are in the same order on all ranks."""
    if not world.allgather([lacking], "hvdrecover.lacking").any():
        return
    pieces = (
        arena.buffer[start : start + PIECE]
        for arena in arenas.values()
        for start in range(0, len(arena.buffer), PIECE)
    )
    scratch = None  # for a rank that has the bytes already
    for number, piece in enumerate(pieces):
        if not lacking and world.rank() != root:
            scratch = allocate(PIECE) if scratch is None else scratch
            piece = scratch[: len(piece)]
        _send(world, root, piece, number)


def _send(world: World, root: int, piece: Any, number: int) -> None:
    world.broadcast(piece, root, f"hvdrecover.snapshot.{number}.{len(piece)}")


def _broadcast_json(world: World, root: int, value: dict[str, Any] | None) -> dict[str, Any]:
    text = np.frombuffer(json.dumps(value, default=dict).encode(), dtype=np.uint8).copy()
    length = np.array([len(text)], dtype=np.int64).view(np.uint8)
    world.broadcast(length, root, "hvdrecover.header.length")
    if world.rank() != root:
        text = allocate(int(length.view(np.int64)[0]))
    world.broadcast(text, root, "hvdrecover.header")
    received: dict[str, Any] = json.loads(text.tobytes())
    return received
