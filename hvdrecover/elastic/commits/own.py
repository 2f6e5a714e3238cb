"""The states that each rank has of its own, and all ranks know of all: `PerRank` values and random streams.

They are exchanged before a commit is made. So a rank that holds a commit holds the states of all ranks at
that very commit, and a rank that has lost its memory gets its own back from any other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdrecover.checkpoint import layout
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.commits.copier import Copier, rebuild
from hvdrecover.elastic.commits.per_rank import PerRank
from hvdrecover.elastic.commits.randomness import Generators
from hvdrecover.elastic.interfaces import Framework, Tree, World
from hvdrecover.errors import CorruptCheckpointError, HvdrecoverError, UnsupportedValueError

RANDOM = "_random"  # no attribute has this name

_LARGEST = 1 << 24  # bytes that a rank sends with each commit


@dataclass(frozen=True)
class Shares:
    """The states of one thing on the ranks of a commit.

    Attributes:
        ranks: how many ranks made the commit.
        states: by rank, as far as they are known; of random streams as JSON, of all else as trees.
    """

    ranks: int
    states: Mapping[int, Any] = field(default_factory=dict)


class Own:
    """The states of one rank's own.

    Args:
        framework: whose tensors they may hold.
        values: by attribute name.
        random: the random streams.
    """

    def __init__(self, framework: Framework, values: Mapping[str, PerRank], random: Generators) -> None:
        self._framework = framework
        self._copier = Copier(framework)
        self._values = values
        self.random = random
        self._known: dict[str, Shares] = {}
        self._place = (0, 1)  # for which the present states are

    @property
    def exists(self) -> bool:
        """Return whether ranks have any state of their own."""
        return self.random.stored or bool(self._values)

    # -- exchange --------------------------------------------------------------------------------------

    def gather(self, world: World) -> None:
        """Before a commit of all ranks: learn the states of all.

        Raises:
            UnsupportedValueError: this rank's take more bytes than can be exchanged at each commit.
        """
        if self.exists and world.size() > 1:
            rows = gather_json(world, self._packed(self._present()), "hvdrecover.own")
            self._known, self._place = {}, (world.rank(), world.size())
            for rank, row in enumerate(rows):
                self._learn(rank, world.size(), row)

    def rendezvous(self, world: World, held: Snapshot | None, newest: CommitId | None) -> None:
        """At a rendezvous: learn the present states of those that hold the elected commit.

        Others have none of it: they get theirs from what the commit holds. So does a loader that was made
        anew since, as by a reset callback.

        Args:
            world: the ranks, all of which call this.
            held: the newest commit in this rank's memory.
            newest: the elected one; None if no memory holds any, and all begin with what they have.
        """
        if not self.exists:
            return
        self._known, row = {}, None
        if newest is None:
            row = [world.rank(), world.size(), self._packed(self._present())]
        elif held is not None and held.id == newest:
            self._known = self._stored(held)
            row = [*self._place, self._packed({**self._present(), **self._of_new()})]
        rows = gather_json(world, row, "hvdrecover.own") if world.size() > 1 else [row]
        for each in rows:
            if each is not None:
                self._learn(*each)

    def forget(self) -> None:
        """Training continues, so what is known of the other ranks' states is over."""
        self._known = {}

    def _of_new(self) -> dict[str, Tree]:
        """Return what the commit holds of this rank for loaders that were made anew since."""
        rank, size = self._place
        known = {name: each for name, each in self._known.items() if each.ranks == size}
        new = [name for name, each in self._values.items() if each.is_new and name in known]
        return {name: known[name].states[rank] for name in new if rank in known[name].states}

    def _packed(self, states: Mapping[str, Any]) -> dict[str, Json]:
        """This rank's states as JSON; with the tensors in them as a safetensors file, in base64."""
        parts = self._copier.take_apart({name: states[name] for name in self._values})
        arenas = self._copier.copy(parts, {})
        row: dict[str, Json] = {}
        for name, part in parts.items():
            file = base64.b64encode(arenas[name].buffer.data).decode() if name in arenas else None
            row[name] = [part.outline.structure, file]
        if RANDOM in states:
            row[RANDOM] = states[RANDOM]
        if (size := len(json.dumps(row))) > _LARGEST:
            largest = max(row, key=lambda name: len(json.dumps(row[name])))
            raise UnsupportedValueError(
                f"state.{largest}",
                f"the ranks exchange their own states at each commit, and this rank's take {size} bytes of "
                f"{_LARGEST} that they may. Keep less in it",
            )
        return row

    def _learn(self, rank: int, ranks: int, row: Mapping[str, Json]) -> None:
        """Add what a rank has sent to what is known of a commit of so many ranks."""
        for name in self._names():
            shares = self._known.get(name, Shares(ranks))
            if shares.ranks == ranks:  # else they have been made of these by `PerRank.on_resize`
                state = row[name] if name == RANDOM else self._unpacked(*row[name])
                self._known[name] = Shares(ranks, {**shares.states, rank: state})

    def _unpacked(self, structure: Json, file: str | None) -> Tree:
        if file is None:
            return rebuild(self._framework, structure, None, own=False)
        buffer = np.frombuffer(bytearray(base64.b64decode(file)), dtype=np.uint8)
        header = buffer[: layout.header_size(buffer[:8].tobytes(), len(buffer))].tobytes()
        arena = Arena(layout.parse(header, len(buffer)), buffer)
        return rebuild(self._framework, structure, arena, own=True)

    # -- commits ---------------------------------------------------------------------------------------

    def capture(self, rank: int, size: int) -> dict[str, Shares]:
        """Return what a commit holds: the states of all ranks if they are known, else this rank's."""
        if self._known:
            return self._known
        self._place = (rank, size)
        return {name: Shares(size, {rank: state}) for name, state in self._present().items()}

    def keep(self, snapshot: Snapshot) -> None:
        """The next commit holds the states of this one."""
        self._known |= self._stored(snapshot)

    def resume(self, snapshot: Snapshot, rank: int, size: int, *, load: bool) -> None:
        """Go to this rank's states of a commit, all but the random streams.

        Args:
            snapshot: the commit.
            rank: this rank.
            size: the number of ranks.
            load: whether values are loaded; if not, they are at the commit already.

        Raises:
            PerRankError: they are states of other ranks.
            CorruptCheckpointError: the commit holds nonsense.
        """
        self.forget()
        self._place = (rank, size)
        try:
            stored = self._stored(snapshot)
            for name, each in self._values.items():
                shares = stored.get(name)
                if not load or shares is None or (snapshot.finished and shares.ranks != size):
                    each.keep((rank, size))
                else:
                    each.resume(f"state.{name}", shares.states, shares.ranks, (rank, size))
        except HvdrecoverError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"commit {snapshot.id}", f"the ranks' own states can't be read: {error!r}"
            ) from error

    def _present(self) -> dict[str, Any]:
        """This rank's states: of values as trees, of random streams as JSON."""
        if not self.exists:
            return {}
        streams = self.random.states()
        present = {name: each.state() for name, each in self._values.items()}
        if present and self.random.states() != streams:
            self.random.put(streams)  # a loader that has just been loaded draws when it is asked
        return {**present, RANDOM: streams} if self.random.stored else present

    def _names(self) -> list[str]:
        return [*self._values, *([RANDOM] if self.random.stored else [])]

    def _stored(self, snapshot: Snapshot) -> dict[str, Shares]:
        """The states that a commit holds of what this rank has, too."""
        ranks, found = snapshot.state.get("own", {}), {}
        for name in [name for name in self._names() if name in ranks]:
            if name == RANDOM:
                states = {int(rank): each for rank, each in snapshot.state["random"]["states"].items()}
            else:
                structure = snapshot.state["attributes"][name]
                states = rebuild(self._framework, structure, snapshot.arenas.get(name), own=True)
            found[name] = Shares(ranks[name], states)
        return found
