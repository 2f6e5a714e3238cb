"""The states that each rank has of its own, and all ranks know of all: `PerRank` values and random streams.

They are exchanged before a commit is made. So a process that holds a commit holds the states of all ranks at
that very commit, and one that has lost its memory gets its own back from any other. With virtual ranks, each
process has the states of those that it carries out; whoever carries them out next finds them in the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdrecover.checkpoint import layout
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.agreement import exchange
from hvdrecover.elastic.agreement.exchange import Bytes
from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.commits.copier import Copier, rebuild
from hvdrecover.elastic.commits.randomness import Generators
from hvdrecover.elastic.interfaces import Framework, Tree, World
from hvdrecover.errors import CorruptCheckpointError, HvdrecoverError, UnsupportedValueError

RANDOM = "_random"  # no attribute has this name

_LARGEST = 1 << 26  # bytes that a process sends with each commit


class Value(Protocol):
    """A value of each rank's own.

    Attributes:
        taken: how many items have been taken from it.
    """

    taken: int

    def states(self, carried: Carried) -> dict[int, Tree]:
        """Return what a commit is to hold of these ranks."""

    def made_anew(self, carried: Carried) -> list[int]:
        """Return those of the ranks whose value was made since a state was loaded into the last."""

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """The states of all ranks, which the commit that is about to be made will hold."""

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        """Go to the states of ranks at a commit, made by ``size`` of them. ``name`` is for errors."""

    def keep(self, carried: Carried) -> None:
        """Note that the values are of these ranks."""

    def stand_in(self, rank: int, state: Tree) -> Callable[[], None]:
        """Have a virtual rank begin with a state, for a while; return what puts everything back."""


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
    """The states of the ranks that one process carries out.

    Args:
        framework: whose tensors they may hold.
        values: by attribute name.
        random: the random streams.
    """

    def __init__(self, framework: Framework, values: Mapping[str, Value], random: Generators) -> None:
        self._framework = framework
        self._copier = Copier(framework)
        self._values = values
        self.random = random
        self._known: dict[str, Shares] = {}
        self._carried = Carried((0,), 1)  # for which the present states are

    @property
    def exists(self) -> bool:
        """Return whether ranks have any state of their own."""
        return self.random.stored or bool(self._values)

    # -- exchange --------------------------------------------------------------------------------------

    def gather(self, world: World, carried: Carried) -> None:
        """Before a commit of all ranks: learn the states of all.

        Raises:
            UnsupportedValueError: this process's take more bytes than can be exchanged at each commit.
        """
        if not self.exists:
            return
        if world.size() > 1:
            mine = self._packed(carried, self._present(carried))
            self._known, self._carried = {}, carried
            for head, files in exchange.gather_packed(world, *mine, "hvdrecover.own"):
                self._learn(head, files)
        else:
            self._known = self.capture(carried)
        for name, each in self._values.items():
            each.gathered(self._known[name].states)

    def rendezvous(
        self, world: World, carried: Carried, held: Snapshot | None, newest: CommitId | None
    ) -> None:
        """At a rendezvous: learn the present states of those that hold the elected commit.

        Others have none of it: they get theirs from what the commit holds. So does a loader that was made
        anew since, as by a reset callback.

        Args:
            world: the ranks, all of which call this.
            carried: the ranks that this process carries out from now on.
            held: the newest commit in this rank's memory.
            newest: the elected one; None if no memory holds any, and all begin with what they have.
        """
        if not self.exists:
            return
        self._known = {}
        mine: tuple[Any, list[Bytes]] = (None, [])
        if newest is None:
            mine = self._packed(carried, self._present(carried))
        elif held is not None and held.id == newest:
            self._known = self._stored(held)
            present = self._present(self._carried)
            for name, states in self._of_new().items():
                present[name] |= states
            mine = self._packed(self._carried, present)
        rows = [mine] if world.size() == 1 else exchange.gather_packed(world, *mine, "hvdrecover.own")
        for head, files in rows:
            if head is not None:
                self._learn(head, files)
        for name, shares in self._known.items():
            if name in self._values:
                self._values[name].gathered(shares.states)

    def forget(self) -> None:
        """Training continues, so what is known of the other ranks' states is over."""
        self._known = {}

    def _of_new(self) -> dict[str, dict[int, Tree]]:
        """Return what the commit holds of this process for loaders that were made anew since."""
        known = {name: each for name, each in self._known.items() if each.ranks == self._carried.size}
        return {
            name: {
                rank: known[name].states[rank]
                for rank in each.made_anew(self._carried)
                if rank in known[name].states
            }
            for name, each in self._values.items()
            if name in known
        }

    def _packed(self, carried: Carried, present: Mapping[str, Any]) -> tuple[Any, list[Bytes]]:
        """These states as JSON; and for each value that holds tensors, a safetensors file."""
        parts = self._copier.take_apart({name: present[name] for name in self._values})
        arenas = self._copier.copy(parts, {})
        values = {name: [part.outline.structure, name in arenas] for name, part in parts.items()}
        random = {str(rank): each for rank, each in present.get(RANDOM, {}).items()}
        head = {"ranks": carried.ranks, "size": carried.size, "values": values, RANDOM: random}
        files: list[Bytes] = [arenas[name].buffer for name in values if name in arenas]
        if (size := sum(map(len, files)) + len(exchange.encoded(head))) > _LARGEST:
            largest = max(
                values,
                key=lambda name: (
                    len(exchange.encoded(values[name])) + (len(arenas[name].buffer) if name in arenas else 0)
                ),
            )
            raise UnsupportedValueError(
                f"state.{largest}",
                f"the ranks exchange their own states at each commit, and this rank's take {size} bytes of "
                f"{_LARGEST} that they may. Keep less in it",
            )
        return head, files

    def _learn(self, head: Mapping[str, Any], files: list[Bytes]) -> None:
        """Add what a process has sent to what is known."""
        ranks, left = int(head["size"]), iter(files)
        for name in self._values:
            structure, has_file = head["values"][name]
            self._add(name, ranks, self._unpacked(structure, next(left) if has_file else None))
        if self.random.stored:
            self._add(RANDOM, ranks, {int(rank): each for rank, each in head[RANDOM].items()})

    def _add(self, name: str, ranks: int, states: Mapping[int, Any]) -> None:
        shares = self._known.get(name, Shares(ranks))
        if shares.ranks == ranks:  # else they have been made of these by `PerRank.on_resize`
            self._known[name] = Shares(ranks, {**shares.states, **states})

    def _unpacked(self, structure: Any, file: Bytes | None) -> Any:
        if file is None:
            return rebuild(self._framework, structure, None, own=False)
        header = file[: layout.header_size(file[:8].tobytes(), len(file))].tobytes()
        return rebuild(self._framework, structure, Arena(layout.parse(header, len(file)), file), own=True)

    # -- commits ---------------------------------------------------------------------------------------

    def capture(self, carried: Carried) -> dict[str, Shares]:
        """Return what a commit holds: the states of all ranks if they are known, else this process's."""
        if self._known:
            return self._known
        self._carried = carried
        present = self._present(carried)
        for name, each in self._values.items():
            each.gathered(present[name])
        return {name: Shares(carried.size, states) for name, states in present.items()}

    def keep(self, snapshot: Snapshot) -> None:
        """The next commit holds the states of this one."""
        self._known |= self._stored(snapshot)

    def resume(self, snapshot: Snapshot, carried: Carried, *, load: bool) -> None:
        """Go to the states of a commit that are these ranks' own, all but the random streams.

        Args:
            snapshot: the commit.
            carried: the ranks.
            load: whether values are loaded; if not, they are at the commit already.

        Raises:
            PerRankError: they are states of other ranks.
            CorruptCheckpointError: the commit holds nonsense.
        """
        self.forget()
        self._carried = carried
        try:
            stored = self._stored(snapshot)
            for name, each in self._values.items():
                shares = stored.get(name)
                if load and shares is not None and not (snapshot.finished and shares.ranks != carried.size):
                    each.resume(f"state.{name}", shares.states, shares.ranks, carried)
                each.keep(carried)
        except HvdrecoverError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"commit {snapshot.id}", f"the ranks' own states can't be read: {error!r}"
            ) from error

    def move(self, carried: Carried) -> None:
        """Right after a commit of all: carry out other virtual ranks, from the states that were exchanged."""
        self._carried = carried
        for name, each in self._values.items():
            # Those that stay as well: their loaders are iterated over anew, which would begin at the start.
            each.resume(f"state.{name}", self._known[name].states, self._known[name].ranks, carried)
            each.keep(carried)

    def share_of(self, rank: int) -> dict[str, Tree]:
        """Return the states of a virtual rank of this process, by name."""
        carried = Carried((rank,), self._carried.size)
        return {name: each.states(carried)[rank] for name, each in self._values.items()}

    def stand_in(self, rank: int, states: Mapping[str, Tree]) -> Callable[[], None]:
        """Compute a virtual rank's part in the place of its process, or once more on this one.

        Args:
            rank: the virtual rank.
            states: that it begins with; see `share_of`.

        Returns:
            What puts everything back.
        """
        undo = [each.stand_in(rank, states[name]) for name, each in self._values.items()]

        def put_back() -> None:
            for each in undo:
                each()

        return put_back

    def _present(self, carried: Carried) -> dict[str, dict[int, Any]]:
        """The states of ranks: of values as trees, of random streams as JSON."""
        if not self.exists:
            return {}
        streams = self.random.states()
        present: dict[str, dict[int, Any]] = {
            name: each.states(carried) for name, each in self._values.items()
        }
        if present and self.random.states() != streams:
            self.random.put(streams)  # a loader that has just been loaded draws when it is asked
        random = dict.fromkeys(carried.ranks, streams)
        return {**present, RANDOM: random} if self.random.stored else present

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
