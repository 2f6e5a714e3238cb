"""The states that each rank has of its own, and all ranks know of all: `PerRank` values and random streams.

They are exchanged before a commit is made. So a process that holds a commit holds the states of all ranks at
that very commit, and one that has lost its memory gets its own back from any other. With virtual ranks, each
process has the states of those that it carries out; whoever carries them out next finds them in the commit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hvdrecover.elastic.interfaces import Buffer, Framework, Tree, World
from hvdrecover.errors import CorruptCheckpointError, HvdrecoverError, UnsupportedValueError

RANDOM = "_random"  # no attribute has this name

_LARGEST = 1 << 26  # bytes that a process sends with each commit
_layout = functools.lru_cache(maxsize=16)(layout.parse)  # of a value, that of most ranks is the same


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
        states: by rank, as far as they are known, as trees; of random streams as JSON, as are their ranks.
    """

    ranks: int
    states: Mapping[Any, Any] = field(default_factory=dict)


class Sent(Mapping[str, Any]):
    """The states of all ranks' random streams by rank, read when somebody asks for them.

    Few commits are written, and few are resumed from: where each rank reads at each commit what all others
    have sent, a thousand ranks take a thousand times as long as one.

    Args:
        rows: what the processes have sent.
    """

    def __init__(self, rows: Sequence[Buffer]) -> None:
        self._rows = rows

    @functools.cached_property
    def _states(self) -> dict[str, Any]:
        heads = (exchange.unpacked(row)[0] for row in self._rows)
        return {rank: state for head in heads for rank, state in head[RANDOM].items()}

    def __getitem__(self, rank: str) -> Any:
        return self._states[rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


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
        self.forget()  # the values of a commit that failed later
        if not self.exists:
            return
        if world.size() > 1:
            rows = world.gather(self._packed(carried, self._present(carried)), "hvdrecover.own")
            self._known, self._carried = {}, carried
            if self._values:
                self._learn(map(exchange.unpacked, rows))
            else:
                self._known = {RANDOM: Shares(carried.size, Sent(rows))}
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
        mine = exchange.packed(None, [])
        if newest is None:
            mine = self._packed(carried, self._present(carried))
        elif held is not None and held.id == newest:
            self._known = self._stored(held)
            present = self._present(self._carried)
            for name, states in self._of_new().items():
                present[name] |= states
            mine = self._packed(self._carried, present)
        rows = [mine] if world.size() == 1 else world.gather(mine, "hvdrecover.own")
        self._learn(map(exchange.unpacked, rows))
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

    def _packed(self, carried: Carried, present: Mapping[str, Any]) -> bytes:
        """These states as JSON and, for each value that holds tensors, a safetensors file."""
        parts = self._copier.take_apart({name: present[name] for name in self._values})
        arenas = self._copier.copy(parts, {})
        values = {name: [part.outline.structure, name in arenas] for name, part in parts.items()}
        head = {
            "ranks": carried.ranks,
            "size": carried.size,
            "values": values,
            RANDOM: present.get(RANDOM, {}),
        }
        files: list[Bytes] = [arenas[name].buffer for name in values if name in arenas]
        row = exchange.packed(head, files)
        if len(row) > _LARGEST:
            largest = max(
                values,
                key=lambda name: (
                    len(exchange.encoded(values[name])) + (len(arenas[name].buffer) if name in arenas else 0)
                ),
            )
            raise UnsupportedValueError(
                f"state.{largest}",
                f"the ranks exchange their own states at each commit, and this rank's take {len(row)} "
                f"bytes of {_LARGEST} that they may. Keep less in it",
            )
        return row

    def _learn(self, sent: Iterable[tuple[Any, list[Bytes]]]) -> None:
        """Add what processes have sent to what is known; None has been sent by those that have nothing."""
        known = {name: Shares(shares.ranks, dict(shares.states)) for name, shares in self._known.items()}

        def add(name: str, ranks: int, states: Mapping[Any, Any]) -> None:
            shares = known.setdefault(name, Shares(ranks, {}))
            if shares.ranks == ranks:  # else they have been made of these by `PerRank.on_resize`
                shares.states.update(states)  # type: ignore[attr-defined]

        for head, files in sent:
            if head is None:
                continue
            ranks, left = int(head["size"]), iter(files)
            for name in self._values:
                structure, has_file = head["values"][name]
                add(name, ranks, self._unpacked(structure, next(left) if has_file else None))
            if self.random.stored:
                add(RANDOM, ranks, head[RANDOM])
        self._known = known

    def _unpacked(self, structure: Any, file: Bytes | None) -> Any:
        if file is None:
            return rebuild(self._framework, structure, None, own=False)
        header = file[: layout.header_size(file[:8].tobytes(), len(file))].tobytes()
        return rebuild(self._framework, structure, Arena(_layout(header, len(file)), file), own=True)

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
        random: dict[Any, Any] = {str(rank): streams for rank in carried.ranks}
        return present | {RANDOM: random} if self.random.stored else present

    def _names(self) -> list[str]:
        return [*self._values, *([RANDOM] if self.random.stored else [])]

    def _stored(self, snapshot: Snapshot) -> dict[str, Shares]:
        """The states that a commit holds of what this rank has, too."""
        ranks, found = snapshot.state.get("own", {}), {}
        for name in [name for name in self._names() if name in ranks]:
            if name == RANDOM:
                states = snapshot.state["random"]["states"]
            else:
                structure = snapshot.state["attributes"][name]
                states = rebuild(self._framework, structure, snapshot.arenas.get(name), own=True)
            found[name] = Shares(ranks[name], states)
        return found
