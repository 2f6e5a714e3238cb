"""How ranks that have met agree on one commit: who has the newest, and handing it to all."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from hvdrecover import errors, heartbeat
from hvdrecover.checkpoint.arena import Arena, Bytes, allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import digest
from hvdrecover.checkpoint.layout import parse
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.guard.votes import vote
from hvdrecover.elastic.interfaces import World
from hvdrecover.errors import StoppedError

Source = Literal["memory", "durable", "initial"]

_PIECE = 1 << 26  # bytes in one broadcast


@dataclass(frozen=True)
class Election:
    """Whose memory the job goes on from.

    Attributes:
        root: the rank that sends; rank 0 if nobody's memory holds a commit.
        newest: the newest commit in anybody's memory, or None.
        alike: whether all ranks were started with the same, as far as they tell.
        odd: ranks whose memory holds the newest commit, but with other parameters than the root's.
        sure: whether more ranks side with the root than with any other.
    """

    root: int
    newest: CommitId | None
    alike: bool = True
    odd: tuple[int, ...] = ()
    sure: bool = True


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


def elect(published: Sequence[CommitId], ballots: Sequence[Hashable] = ()) -> Election:
    """Choose the lowest of the ranks that hold the newest commit, and hold it as most of them do.

    Args:
        published: each rank's newest commit in memory; generation 0 stands for none.
        ballots: each rank's digest of it, if they have taken any.
    """
    newest = max(published)
    if newest.generation == 0:
        return Election(0, None)
    holders = [rank for rank, commit in enumerate(published) if commit == newest]
    result = vote([ballots[rank] if ballots else None for rank in holders])
    odd = tuple(holders[place] for place in result.wrong)
    return Election(holders[result.right[0]], newest, odd=odd, sure=not result.tied)


def publish(
    world: World,
    mine: CommitId | None,
    structure: Sequence[int] = (0, 0),
    ballot: Sequence[int] = (0, 0, 0),
) -> Election:
    """Tell the others what this rank's memory holds, and elect the root.

    They also learn how long ranks have been without progress at most, so that all judge hangs alike.

    Args:
        world: the ranks.
        mine: the newest commit in this rank's memory.
        structure: a digest of what this rank was started with.
        ballot: a digest of the parameters of that commit.
    """
    own = mine or CommitId(0, 0)
    silences = [math.ceil(seconds * 1000) for seconds in heartbeat.longest()]
    row = [own.generation, own.commit, *silences, *structure, *ballot]
    table = world.allgather(row, "hvdrecover.election")
    generations, commits = table[:, :2].T.tolist()
    heartbeat.has_seen(*(table[:, 2:4].max(axis=0) / 1000).tolist())
    published = [CommitId(*each) for each in zip(generations, commits, strict=True)]
    election = elect(published, [tuple(each) for each in table[:, 6:].tolist()])
    return replace(election, alike=bool((table[:, 4:6] == table[0, 4:6]).all()))


def send(world: World, root: int, agreement: Agreement) -> None:
    """Hand the root's commit to the other ranks.

    Those that turn out to hold the very bytes keep what they have; if all do, only its description is sent.
    """
    snapshot = agreement.snapshot
    held = _digests(snapshot) if agreement.source == "memory" and world.size() > 1 else {}
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
        "digests": held,
    }
    _broadcast_json(world, root, header)
    if _anybody_lacks(world, False):
        for arena in snapshot.arenas.values():
            _broadcast_buffer(world, root, arena.buffer)


def send_failure(world: World, root: int, error: BaseException) -> None:
    """Tell the other ranks that the root has nothing to send."""
    kind = errors.kinds(error)[:1] or [type(error).__name__]
    _broadcast_json(world, root, {"error": f"{type(error).__name__}: {error}", "kind": kind[0]})


def receive(world: World, root: int, held: Snapshot | None = None) -> Agreement:
    """Take the root's commit, into memory of its own: what this rank holds stays whole until all has come.

    Args:
        world: the ranks.
        root: the rank that sends.
        held: the commit in this rank's memory, if it may be the one that is sent. If its bytes are, its
            memory is used, and nothing is copied.

    Raises:
        StoppedError: the root could not load a commit.
    """
    mine = _digests(held) if held is not None else {}  # while the root makes its own
    header = _broadcast_json(world, root, None)
    if "error" in header:
        raise StoppedError(f"rank {root} has no state to go on from. {header['error']}", header["kind"])
    snapshot = Snapshot(
        id=CommitId(*header["id"]),
        arenas={},
        state=header["state"],
        world_size=header["world_size"],
        versions=header["versions"],
        finished=header["finished"],
    )
    lacking = held is None or mine != header["digests"]
    if held is not None and not lacking:
        snapshot.arenas = held.arenas
    if _anybody_lacks(world, lacking):
        for name, (size, text) in header["files"].items():
            if lacking:
                snapshot.arenas[name] = Arena(parse(base64.b64decode(text), size))
                _broadcast_buffer(world, root, snapshot.arenas[name].buffer)
            else:
                _pass_on(world, root, size)
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


def _digests(snapshot: Snapshot) -> dict[str, str]:
    return {name: digest(arena.buffer) for name, arena in snapshot.arenas.items()}


def _anybody_lacks(world: World, lacking: bool) -> bool:
    return bool(world.allgather([lacking], "hvdrecover.lacking").any())


def _broadcast_buffer(world: World, root: int, buffer: Bytes) -> None:
    for start in range(0, len(buffer), _PIECE):
        world.broadcast(buffer[start : start + _PIECE], root, _piece_name(len(buffer), start))


def _pass_on(world: World, root: int, size: int) -> None:
    """Take part in the broadcast of a buffer that this rank has no need of."""
    scratch = allocate(min(size, _PIECE))
    for start in range(0, size, _PIECE):
        world.broadcast(scratch[: size - start], root, _piece_name(size, start))


def _piece_name(size: int, start: int) -> str:
    return f"hvdrecover.snapshot.{size}.{start}"
