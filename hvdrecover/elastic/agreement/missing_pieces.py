"""The bytes of a commit, piece by piece: what no rank lacks is not sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum

from hvdrecover.checkpoint.arena import Arena, Bytes, allocate
from hvdrecover.checkpoint.digest import digest_numbers
from hvdrecover.elastic.interfaces import World

PIECE = 1 << 26  # bytes in one broadcast


class Need(IntEnum):
    """The part of a commit that a rank lacks."""

    NOTHING = 0
    PARTS = 1  # it has memory with bytes of before, some of which may be the same
    ALL = 2


def fill(world: World, root: int, arenas: Mapping[str, Arena], need: Need) -> None:
    """Fill the memory of the ranks that need it with the root's bytes.

    Args:
        world: the ranks, all of which call this.
        root: the rank that sends.
        arenas: in the same order on all ranks; the commit's own where nothing is needed, as on the root.
        need: of this rank.
    """
    needs = world.allgather([need], "hvdrecover.lacking").max()
    if needs == Need.NOTHING:
        return
    wanted = _wanted(world, root, arenas, need) if needs == Need.PARTS else None
    scratch = None
    for number, piece in enumerate(_pieces(arenas)):
        if wanted is None or wanted[number]:
            if need == Need.NOTHING and world.rank() != root:
                scratch = allocate(PIECE) if scratch is None else scratch
                piece = scratch[: len(piece)]
            _send(world, root, piece, number)


def _send(world: World, root: int, piece: Bytes, number: int) -> None:
    world.broadcast(piece, root, f"hvdrecover.snapshot.{number}.{len(piece)}")


def _wanted(world: World, root: int, arenas: Mapping[str, Arena], need: Need) -> list[bool]:
    """Return which pieces any rank lacks."""
    known = world.rank() == root or need != Need.NOTHING
    mine = [digest_numbers(piece) if known else (0, 0) for piece in _pieces(arenas)]
    rows = world.allgather([need, *(number for pair in mine for number in pair)], "hvdrecover.parts")
    digests = rows[:, 1:].reshape(len(rows), len(mine), 2)
    differs = (digests != digests[root]).any(axis=2)
    wanted: list[bool] = differs[rows[:, 0] != Need.NOTHING].any(axis=0).tolist()
    return wanted


def _pieces(arenas: Mapping[str, Arena]) -> Iterator[Bytes]:
    for arena in arenas.values():
        for start in range(0, len(arena.buffer), PIECE):
            yield arena.buffer[start : start + PIECE]
