"""Rank-local state: `PerRank` values, random streams, and which ranks a process carries out."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
import random
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from hvdrecover.checkpoint import CommitId, values
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.data.order import SampleOrder
from hvdrecover.errors import (
    ConfigError,
    CorruptCheckpointError,
    HvdrecoverError,
    PerRankError,
    UnsupportedValueError,
)
from hvdrecover.state.adapter import Buffer, Copier, Framework, Tree, World, rebuild

RANDOM = "_random"  # the key of random streams; no attribute has this name

_LARGEST = 1 << 26  # bytes that a process sends with each commit

Randomness = Literal["reseed", "store"]


def is_sampler(value: Any) -> bool:
    """Return whether a value has a place in a sample order, which a commit holds as a cursor."""
    return isinstance(getattr(value, "order", None), SampleOrder)


def stream(run_seed: int, number: int | str, rank: int) -> Callable[[str], int]:
    """Return a function from a generator's name to its seed after one commit; it can be pickled."""
    return functools.partial(_derive, f"{run_seed}/{number}/{rank}")


def _derive(stream: str, generator: str) -> int:
    digest = hashlib.blake2b(f"{stream}/{generator}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def python_state() -> Any:
    """The state of Python's global generator, its 625 words as an array: JSON takes it at every commit."""
    version, words, gauss = random.getstate()
    return version, np.array(words, dtype=np.uint32), gauss


def set_python(state: Any) -> None:
    """Set Python's global generator to what `python_state` or ``random.getstate()`` gave."""
    version, words, gauss = state
    random.setstate((version, tuple(words.tolist() if isinstance(words, np.ndarray) else words), gauss))


def set_numpy(state: Any) -> None:
    """Set numpy's global generator to what ``numpy.random.get_state(legacy=False)`` gave."""
    # numpy does not check a position beyond the end of its buffer, and the process dies.
    for place, end in ((state["state"].get("pos", 0), 624), (state.get("buffer_pos", 0), 4)):
        if not 0 <= place <= end:
            raise ValueError(f"numpy's generator has no place {place}")
    np.random.set_state(state)


OnResize = Callable[[list[Any], int, int], Any]


@dataclass(frozen=True)
class Carried:
    """The ranks whose share of the job a process carries out: itself, or its virtual ranks (perhaps none)."""

    ranks: tuple[int, ...]
    size: int


class Value(Protocol):
    taken: int  # number of items taken from it

    def states(self, carried: Carried) -> dict[int, Tree]:
        """Return the states of these ranks for a commit."""

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """Learn the states of all ranks that the next commit will hold."""

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        """Restore the states of a commit that ``size`` ranks made; call `keep` next."""

    def keep(self, carried: Carried) -> None:
        """Note that the values are of these ranks."""


class Ranks:
    """The ranks of a job without virtual ranks; `hvdrecover.virtual.ranks.VirtualRanks` overrides this."""

    virtual: int | None = None  # the number of virtual ranks

    def rng(self, asked: Randomness | None, default: Randomness) -> Randomness:
        return asked or default

    def join(self, context: Any, own: RankLocalState, guard: Any) -> tuple[Any, ...]:
        """Take a place in a state; called once, returns the hooks that come with these ranks."""
        return ()

    def values(self) -> Mapping[str, Value]:
        """Return the rank-local values besides the user's `PerRank`, by hidden name."""
        return {}

    def split(self, value: PerRank) -> None:
        """Give each of these ranks its own value."""

    def deal(self, order: SampleOrder) -> None:
        """Deal the samples of an order to these ranks."""

    def carried_by(self, rank: int, size: int) -> Carried:
        return Carried((rank,), size)


class Place:
    """This rank's place in the job; before its first agreement with the other ranks, it counts as alone."""

    def __init__(self, world: World, ranks: Ranks) -> None:
        self._world = world
        self._ranks = ranks
        self.rank, self.size = 0, 1
        self.job = ""
        self.joined = False  # whether this rank has agreed on a state with the other ranks of the job

    def arrived(self) -> None:
        """Take the rank and size of the last rendezvous; until this call, the old ones hold."""
        if self.joined:
            self.rank, self.size = self._world.rank(), self._world.size()

    def join(self, job: str) -> None:
        self.job, self.joined = job, True
        self.arrived()

    @property
    def carried(self) -> Carried:
        return self._ranks.carried_by(self.rank, self.size)

    @property
    def stream(self) -> int:
        """Return the number of this process's random stream outside of a virtual rank's part."""
        # All processes share that stream, so its number is no virtual rank's.
        return self.rank if self._ranks.virtual is None else self._ranks.virtual


class PerRank:
    """A rank-local value, tracked as an attribute of a state.

    Of other attributes, all ranks have the source rank's copy after a recovery. Of a `PerRank`, each commit
    holds the values of all ranks, and each rank gets its own value back: after a rollback, after a restart in
    place, and from a durable commit. Read and assign ``state.name.value``. Iterate over ``state.name``
    itself: then a resumed run draws the same random numbers as an undisturbed one.

    In a state with virtual ranks, each virtual rank has its own value, and ``value`` belongs to the virtual
    rank whose batch is being processed.

    Args:
        value: a plain value, or an object with ``state_dict`` and ``load_state_dict``, such as a loader that
            stores its position. With virtual ranks, instead of such an object: a function that takes a
            virtual rank and their number, and makes the object.
        on_resize: called if the number of ranks, or the rank of this process, differs from the commit's. It
            takes a list of the states of all ranks of the commit, this rank and the number of ranks. It
            returns the state from which this rank resumes; None leaves an object with ``state_dict``
            unchanged. Each call must return the same.

    Attributes:
        taken: number of items taken by iterating.
        on_iterate: called when an iteration begins, after ``iter(value)``.

    Raises:
        ConfigError: the value must be the same on all ranks, such as an elastic sampler.

    Examples:
        >>> losses = recover.PerRank(0.0, on_resize=lambda states, rank, size: sum(states) / size)
        >>> losses.value += 0.5  # as state.losses.value, once it is an attribute of a state
        >>> losses.value
        0.5
    """

    def __init__(self, value: Any, on_resize: OnResize | None = None) -> None:
        if isinstance(value, PerRank) or is_sampler(value):
            raise ConfigError(
                "PerRank",
                f"a {type(value).__name__} is not a rank's own; make it an attribute of the state as it is",
            )
        self.on_resize = on_resize
        self.taken = 0
        self.on_iterate: Callable[[], None] | None = None
        self._given = value
        self._each = {0: self._made(value)}  # by virtual rank; without these, the only one
        self._size: int | None = None  # the number of virtual ranks, if there are any
        self._current: Callable[[], int] = lambda: 0  # the virtual rank that is being carried out

    @property
    def value(self) -> Any:
        """The value itself."""
        return self.of(self._current())

    @value.setter
    def value(self, value: Any) -> None:
        self._each[self._current()] = self._made(value)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.value)
        if self.on_iterate is not None:
            self.on_iterate()
        for item in iterator:
            self.taken += 1
            yield item

    def stateful(self, value: Any) -> Any:
        """Return the object with ``state_dict`` and ``load_state_dict``; None for a plain value."""
        verbs = [getattr(value, verb, None) for verb in ("state_dict", "load_state_dict")]
        return value if all(map(callable, verbs)) and not isinstance(value, type) else None

    def of(self, rank: int) -> Any:
        """The value of a virtual rank."""
        return self._of(rank).value

    def ended(self, rank: int) -> None:
        """Note that the iteration over a virtual rank's value has ended, so the next one starts again."""

    # -- called by the state, as a `Value` -----------------------------------------------------------------

    def become_virtual(self, size: int, current: Callable[[], int]) -> None:
        """Make a value for each virtual rank; ``current`` returns the rank that is being processed."""
        if self._each[0].stateful is not None:
            raise ConfigError(
                "PerRank",
                f"each virtual rank has its own {type(self._given).__name__}: pass a function that makes it, "
                "PerRank(lambda rank, size: ...)",
            )
        self._current, self._size, self._each = current, size, {}

    def states(self, carried: Carried) -> dict[int, Tree]:
        """The states of these ranks for a commit."""
        return {rank: self._of(rank).state() for rank in carried.ranks}

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """Does nothing: no value depends on those of other ranks."""

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        """Restore the states of a commit that ``size`` ranks made."""
        for rank in carried.ranks:
            one, place = self._of(rank), (rank, carried.size)
            if size == carried.size and (one.place in (None, place) or one.stateful is None):
                if rank not in states:
                    raise PerRankError(
                        name,
                        f"the commit has no state of rank {rank}; state.save() knows this rank's only, so "
                        "make commits by state.commit()",
                    )
                one.load(states[rank])
            elif self.on_resize is None or len(states) < size:
                other = size != carried.size
                before = f"{size} ranks made the commit" if other else f"its value was of {one.place}"
                raise PerRankError(
                    name,
                    f"{before}, and this one is rank {rank} of {carried.size}. Start {size} ranks, or say "
                    "what they resume from by PerRank(value, on_resize=lambda states, rank, size: ...)",
                )
            else:
                state = self.on_resize([states[each] for each in range(size)], rank, carried.size)
                if state is not None or one.stateful is None:
                    one.load(state)

    def keep(self, carried: Carried) -> None:
        """Note that the values are of these ranks."""
        for rank in carried.ranks:
            self._of(rank).place = (rank, carried.size)
        if self._size is not None:
            self._each = {rank: one for rank, one in self._each.items() if rank in carried.ranks}

    def _made(self, value: Any) -> _One:
        return _One(value, self.stateful(value))

    def _of(self, rank: int) -> _One:
        if self._size is None:
            return self._each[0]
        if rank not in self._each:
            given = self._given
            value = given(rank, self._size) if callable(given) else copy.deepcopy(given)
            self._each[rank] = self._made(value)
        return self._each[rank]


@dataclass
class _One:
    value: Any
    stateful: Any  # the object with state_dict and load_state_dict; None for a plain value
    place: tuple[int, int] | None = None  # the rank and size that it was made for; None if any

    def state(self) -> Tree:
        return self.value if self.stateful is None else self.stateful.state_dict()

    def load(self, state: Tree) -> None:
        if self.stateful is None:
            self.value = state
        else:
            self.stateful.load_state_dict(state)


class Shares(NamedTuple):
    """The known states of a rank-local value."""

    ranks: int  # how many ranks made the commit
    states: Any  # by rank: trees; those of random streams are JSON, and so are their ranks


class _Sent(UserDict[str, Any]):
    """The random states that the processes have sent, by rank, parsed on the first access."""

    def __init__(self, rows: Sequence[Buffer]) -> None:
        self._rows = rows

    # Few commits are written or resumed from. If each rank parsed all messages at each commit, a thousand
    # ranks would take a thousand times as long as one.
    @functools.cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        rows = (json.loads(bytes(row)) for row in self._rows)
        return {rank: state for row in rows for rank, state in row[RANDOM].items()}


class RankLocalState:
    """The rank-local states of the ranks that one process carries out."""

    def __init__(
        self,
        framework: Framework,
        world: World,
        place: Place,
        values: Mapping[str, Value],
        rng: Randomness,
    ) -> None:
        if rng not in get_args(Randomness):
            problem = f"'{rng}' is not a way to treat random generators; use 'reseed' or 'store'"
            raise ConfigError("rng", problem)
        self._framework, self._world, self._place, self._values = framework, world, place, values
        self._copier = Copier(framework)
        self.stores_streams = rng == "store"  # whether the states of generators are part of a commit
        self.seed = 0  # the run's; the random streams are derived from it
        self.stream = 0  # the number of the present stream
        self._known: dict[str, Shares] = {}

    # -- exchange --------------------------------------------------------------------------------------
    # The states of all ranks are exchanged before each commit. So a process that holds a commit holds the
    # states of all ranks, and a process that has lost its memory gets its own back from any other.
    # The process that carries out a virtual rank next finds that rank's states in the commit.

    def gather(self, carried: Carried | None = None) -> None:
        """Learn the states of all ranks before a commit of all; these ranks are carried out here."""
        self.forget()  # the values of a commit that failed later
        if self.stores_streams or self._values:
            carried = carried or self._place.carried
            present = self._present(carried)
            states = self._exchanged(present) if self._world.size() > 1 else present
            self._known = self._shared(states, carried.size)

    def _exchanged(self, present: Mapping[str, Any]) -> dict[str, Any]:
        rows = self._world.gather(self._packed(present), "hvdrecover.own")
        if not self._values:
            return {RANDOM: _Sent(rows)}
        found: dict[str, Any] = {name: {} for name in present}
        for message in (json.loads(bytes(row)) for row in rows):
            for name, (structure, file) in message["values"].items():
                found[name].update(self._rebuilt(structure, file))
            if self.stores_streams:
                found[RANDOM].update(message[RANDOM])
        return found

    def _shared(self, states: Mapping[str, Any], size: int) -> dict[str, Shares]:
        for name, each in self._values.items():
            each.gathered(states[name])
        return {name: Shares(size, each) for name, each in states.items()}

    def rendezvous(self, carried: Carried, held: Snapshot | None, newest: CommitId | None) -> None:
        """Learn the states from the elected commit, if this rank holds it."""
        if newest is None:  # no memory holds a commit: each rank begins with its present states
            self.gather(carried)
            return
        self._known = self._stored(held) if held is not None and held.id == newest else {}
        for name, shares in self._known.items():
            if name in self._values:
                self._values[name].gathered(shares.states)

    def forget(self) -> None:
        self._known = {}

    def _packed(self, present: Mapping[str, Any]) -> bytes:
        """Return these states as JSON, with a safetensors file for each value that holds tensors."""
        parts = self._copier.take_apart({name: present[name] for name in self._values})
        layouts = {name: part.plan.layout for name, part in parts.items()}
        arenas = {name: Arena(layout) for name, layout in layouts.items() if layout is not None}
        self._copier.copy(parts, arenas)
        files = {name: base64.b64encode(arena.buffer.data).decode() for name, arena in arenas.items()}
        packed = {name: [part.structure, files.get(name)] for name, part in parts.items()}
        message = {"values": packed, RANDOM: present.get(RANDOM, {})}
        row = json.dumps(message).encode()
        if len(row) > _LARGEST:
            largest = max(packed, key=lambda name: len(json.dumps(packed[name])))
            raise UnsupportedValueError(
                f"state.{largest}",
                f"the ranks exchange their own states at each commit, and this rank's take {len(row)} "
                f"bytes of {_LARGEST} that they may. Keep less in it",
            )
        return row

    def _rebuilt(self, structure: Any, text: str | None) -> Any:
        if text is None:
            return rebuild(self._framework, structure, None, own=False)
        file = np.frombuffer(bytearray(base64.b64decode(text)), dtype=np.uint8)  # writable, as torch wants it
        return rebuild(self._framework, structure, Arena.of_file(file), own=True)

    # -- commits ---------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Shares]:
        """Return the states for a commit: all ranks' states if they are known, else this process's."""
        if self._known or not (self.stores_streams or self._values):
            return self._known
        carried = self._place.carried
        return self._shared(self._present(carried), carried.size)

    def keep(self, snapshot: Snapshot) -> None:
        """Have the next commit hold the states of this one."""
        self._known |= self._stored(snapshot)

    def resume(self, snapshot: Snapshot, *, load: bool) -> None:
        """Go to the states of a commit, all but the random streams."""
        self.forget()
        carried = self._place.carried
        try:
            # Without ``load``, the values are at the commit already: note only which ranks they belong to.
            stored = self._stored(snapshot) if load else {}
            for name, each in self._values.items():
                shares = stored.get(name)
                if shares is not None and not (snapshot.finished and shares.ranks != carried.size):
                    each.resume(f"state.{name}", shares.states, shares.ranks, carried)
                each.keep(carried)
        except HvdrecoverError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"the ranks' own states can't be read: {error!r}"
            raise CorruptCheckpointError(f"commit {snapshot.id}", reason) from error

    # With ``"reseed"``, each rank seeds its generators at every commit, from the run's seed, the stream's
    # number and the rank. So a commit stores two numbers, a rank that lost its memory continues with its own
    # stream, and a rank that joins has a new one. The number rises at every commit that changes something.
    # With ``"store"``, a commit holds each rank's generators. A rank without stored ones is seeded as above.
    def resume_streams(self, snapshot: Snapshot) -> None:
        """Go to the random stream that began at a commit."""
        rank, commit = self._place.stream, snapshot.id.commit
        try:
            kept = snapshot.state["random"]
            self.seed, self.stream = int(kept["seed"]), int(kept.get("stream", commit))
            states = kept["states"].get(str(rank)) if self.stores_streams else None
            if states is None:
                self._framework.seed(stream(self.seed, self.stream, rank))
            else:
                self._framework.set_generators(values.decode(states))
        except Exception as error:  # each framework has its own
            raise CorruptCheckpointError(
                f"commit {commit}", f"its random streams can't be set: {error!r}"
            ) from error

    def move(self, carried: Carried) -> None:
        """Right after a commit of all: carry out other virtual ranks, from the states that were exchanged."""
        for name, each in self._values.items():
            # Those that stay as well: their loaders are iterated over again, which would begin at the start.
            ranks, states = self._known[name]
            each.resume(f"state.{name}", states, ranks, carried)
            each.keep(carried)

    def _present(self, carried: Carried) -> dict[str, dict[int, Any]]:
        streams = values.encode(self._framework.generators(), "rng")
        present: dict[str, dict[int, Any]] = {
            name: each.states(carried) for name, each in self._values.items()
        }
        if present and values.encode(self._framework.generators(), "rng") != streams:
            # A loader that has just been loaded draws when it is asked.
            self._framework.set_generators(values.decode(streams))
        random_states: dict[Any, Any] = {str(rank): streams for rank in carried.ranks}
        return present | {RANDOM: random_states} if self.stores_streams else present

    def _stored(self, snapshot: Snapshot) -> dict[str, Shares]:
        """The states in a commit of the values that this rank has as well."""
        ranks = snapshot.state.get("own", {})
        found = {}
        for name in [name for name in self._values if name in ranks]:  # in the same order on all ranks
            structure = snapshot.state["attributes"][name]
            states = rebuild(self._framework, structure, snapshot.arenas.get(name), own=True)
            found[name] = Shares(ranks[name], states)
        if self.stores_streams and RANDOM in ranks:
            found[RANDOM] = Shares(ranks[RANDOM], snapshot.state["random"]["states"])
        return found
