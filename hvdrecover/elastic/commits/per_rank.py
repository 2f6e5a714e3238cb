"""A value of which each rank has its own, such as a data loader or a running loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdrecover.data.order import is_sampler
from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.interfaces import Tree
from hvdrecover.errors import ConfigError, PerRankError

OnResize = Callable[[list[Any], int, int], Any]
Current = Callable[[], int]
"""Returns the virtual rank that is being carried out."""


class PerRank:
    """A value of this rank's own, tracked as an attribute of a state.

    Of other attributes, all ranks have one rank's copy after a recovery. Of this one, each commit holds the
    states of all ranks, and each rank gets its own back: after a rollback, in a process that was restarted in
    place, and from a durable commit. Read and assign ``state.name.value``; iterate over ``state.name``, which
    leaves the random streams as they are in an undisturbed run.

    In a state with virtual ranks, each of these has its own, whichever process carries it out, and ``value``
    is that of the virtual rank that is being carried out.

    Args:
        value: has ``state_dict`` and ``load_state_dict``, as a loader that knows its place has; or is a plain
            value. With virtual ranks, in the place of the first a function of a virtual rank and their number
            that makes it.
        on_resize: called when the ranks are not those of the commit: with the states of all its ranks by
            rank, this rank and the number of ranks. Returns the state that this rank resumes from. Of a value
            with ``state_dict``, None leaves it as it is. It must return the same whenever it is called.

    Attributes:
        on_resize: as above.
        taken: how many items have been taken from it by iterating.
        on_iterate: called when an iteration begins, after the value has begun it.

    Raises:
        ConfigError: all ranks have the value in common, as they have an elastic sampler.

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
        self._current: Current | None = None
        self._given = value
        self._one = self._made(value)
        self._each: dict[int, _One] = {}
        self._sent: dict[int, Tree] = {}

    @property
    def value(self) -> Any:
        """The value itself."""
        return self.of(self._current() if self._current is not None else 0)

    @value.setter
    def value(self, value: Any) -> None:
        if self._current is None:
            self._one = self._made(value)
        else:
            self._each[self._current()] = self._made(value)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.value)
        if self.on_iterate is not None:
            self.on_iterate()
        for item in iterator:
            self.taken += 1
            yield item

    def stateful(self, value: Any) -> Any:
        """Return what has ``state_dict`` and ``load_state_dict`` for a value; None for a plain one."""
        verbs = [getattr(value, verb, None) for verb in ("state_dict", "load_state_dict")]
        return value if all(map(callable, verbs)) and not isinstance(value, type) else None

    def of(self, rank: int) -> Any:
        """Return the value of a virtual rank."""
        return self._of(rank).value

    def ended(self, rank: int) -> None:
        """The value of a virtual rank has been gone through to its end; what is iterable begins anew."""

    # -- called by the state -----------------------------------------------------------------------------

    def become_virtual(self, size: int, current: Current) -> None:
        """Have a value for each virtual rank from now on.

        Args:
            size: their number.
            current: says which is being carried out.

        Raises:
            ConfigError: it was given one value with a state, which can't be that of several virtual ranks.
        """
        if self._one.stateful is not None:
            raise ConfigError(
                "PerRank",
                f"each virtual rank has its own {type(self._given).__name__}: pass a function that makes it, "
                "PerRank(lambda rank, size: ...)",
            )
        self._current, self._size = current, size

    def states(self, carried: Carried) -> dict[int, Tree]:
        """Return what a commit is to hold of these ranks."""
        return {rank: self._of(rank).state() for rank in carried.ranks}

    def made_anew(self, carried: Carried) -> list[int]:
        """Return those of the ranks whose value was made since a state was loaded into the last."""
        ones = {rank: self._of(rank) for rank in carried.ranks}
        return [rank for rank, one in ones.items() if one.stateful is not None and one.place is None]

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """The states of all ranks, which the commit that is about to be made will hold."""

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        """Go to the states of ranks at a commit.

        Args:
            name: what to call it in an error.
            states: those that the commit holds, by rank.
            size: how many ranks made the commit.
            carried: the ranks to go to the states of.

        Raises:
            PerRankError: the ranks are others, and there is no `on_resize`; or a rank's state is lost.
        """
        for rank in carried.ranks:
            self._resume(name, states, size, rank, carried.size)
            self._of(rank).place = (rank, carried.size)

    def keep(self, carried: Carried) -> None:
        """Note that the values are of these ranks; those of others are let go."""
        for rank in carried.ranks:
            self._of(rank).place = (rank, carried.size)
        self._each = {rank: one for rank, one in self._each.items() if rank in carried.ranks}
        self._sent.clear()

    def stand_in(self, rank: int, state: Tree) -> Callable[[], None]:
        """Have a virtual rank begin with a state, for a while; its value is made when it is asked for.

        Returns:
            What puts its own value back.
        """
        own = self._each.pop(rank, None)
        self._sent[rank] = state

        def put_back() -> None:
            self._sent.clear()
            self._each.pop(rank, None)
            if own is not None:
                self._each[rank] = own

        return put_back

    def _resume(self, name: str, states: Mapping[int, Tree], ranks: int, rank: int, size: int) -> None:
        one = self._of(rank)
        if ranks == size and (one.place in (None, (rank, size)) or one.stateful is None):
            if rank not in states:
                raise PerRankError(
                    name,
                    f"the commit has no state of rank {rank}; state.save() knows this rank's only, so make "
                    "commits by state.commit()",
                )
            one.load(states[rank])
        elif self.on_resize is None or len(states) < ranks:
            now = f"this one is rank {rank} of {size}"
            before = f"{ranks} ranks made the commit" if ranks != size else f"its value was of {one.place}"
            raise PerRankError(
                name,
                f"{before}, and {now}. Start {ranks} ranks, or say what they resume from by "
                "PerRank(value, on_resize=lambda states, rank, size: ...)",
            )
        elif (state := self.on_resize([states[each] for each in range(ranks)], rank, size)) is not None or (
            one.stateful is None
        ):
            one.load(state)

    def _made(self, value: Any) -> _One:
        return _One(value, self.stateful(value))

    def _of(self, rank: int) -> _One:
        if self._current is None:
            return self._one
        if rank not in self._each:
            given = self._given
            self._each[rank] = self._made(
                given(rank, self._size) if callable(given) else copy.deepcopy(given)
            )
            if rank in self._sent:
                self._each[rank].load(self._sent[rank])
        return self._each[rank]


class _One:
    """The value of one rank.

    Args:
        value: the value.
        stateful: what has ``state_dict`` and ``load_state_dict`` for it; None for a plain one.

    Attributes:
        place: the rank, and of how many, that it was made for; None if that is whichever it is now.
    """

    def __init__(self, value: Any, stateful: Any) -> None:
        self.value = value
        self.stateful = stateful
        self.place: tuple[int, int] | None = None

    def state(self) -> Tree:
        return self.value if self.stateful is None else self.stateful.state_dict()

    def load(self, state: Tree) -> None:
        if self.stateful is None:
            self.value = state
        else:
            self.stateful.load_state_dict(state)
