"""A value of which each rank has its own, such as a data loader or a running loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdrecover.data.order import SampleOrder
from hvdrecover.elastic.interfaces import Tree
from hvdrecover.errors import ConfigError, PerRankError

OnResize = Callable[[list[Any], int, int], Any]


class PerRank:
    """A value of this rank's own, tracked as an attribute of a state.

    Of other attributes, all ranks have one rank's copy after a recovery. Of this one, each commit holds the
    states of all ranks, and each rank gets its own back: after a rollback, in a process that was restarted in
    place, and from a durable commit. Read and assign ``state.name.value``; iterate over ``state.name``, which
    leaves the random streams as they are in an undisturbed run.

    Args:
        value: has ``state_dict`` and ``load_state_dict``, as a loader that knows its place has; or is a plain
            value.
        on_resize: called when the ranks are not those of the commit: with the states of all its ranks by
            rank, this rank and the number of ranks. Returns the state that this rank resumes from. Of a value
            with ``state_dict``, None leaves it as it is. It must return the same whenever it is called.

    Attributes:
        on_resize: as above.
        taken: how many items have been taken from it by iterating.
        on_iterate: called when an iteration begins, after the value has begun it.

    Raises:
        ConfigError: all ranks have the value in common, as they have an elastic sampler.
    """

    def __init__(self, value: Any, on_resize: OnResize | None = None) -> None:
        if isinstance(value, PerRank) or isinstance(getattr(value, "order", None), SampleOrder):
            raise ConfigError(
                "PerRank",
                f"a {type(value).__name__} is not a rank's own; make it an attribute of the state as it is",
            )
        self.on_resize = on_resize
        self.taken = 0
        self.on_iterate: Callable[[], None] | None = None
        self.value = value

    @property
    def value(self) -> Any:
        """The value itself."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._stateful = self.stateful(value)
        self._value = value
        self._place: tuple[int, int] | None = None  # made for the place that this rank has, whichever that is

    @property
    def is_new(self) -> bool:
        """Return whether the value takes a state, and was made since one was loaded into the last."""
        return self._stateful is not None and self._place is None

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._value)
        if self.on_iterate is not None:
            self.on_iterate()
        for item in iterator:
            self.taken += 1
            yield item

    def state(self) -> Tree:
        """Return this rank's part of a commit."""
        return self._value if self._stateful is None else self._stateful.state_dict()

    def stateful(self, value: Any) -> Any:
        """Return what has ``state_dict`` and ``load_state_dict`` for a value; None for a plain one."""
        verbs = [getattr(value, verb, None) for verb in ("state_dict", "load_state_dict")]
        return value if all(map(callable, verbs)) and not isinstance(value, type) else None

    def resume(self, name: str, states: Mapping[int, Tree], ranks: int, place: tuple[int, int]) -> None:
        """Go to this rank's state of a commit.

        Args:
            name: what to call it in an error.
            states: those that the commit holds, by rank.
            ranks: how many ranks made the commit.
            place: this rank, and the number of ranks.

        Raises:
            PerRankError: the ranks are others, and there is no `on_resize`; or this rank's state is lost.
        """
        rank, size = place
        if ranks == size and (self._place in (None, place) or self._stateful is None):
            if rank not in states:
                raise PerRankError(
                    name,
                    f"the commit has no state of rank {rank}; state.save() knows this rank's only, so make "
                    "commits by state.commit()",
                )
            self._load(states[rank])
        elif self.on_resize is None or len(states) < ranks:
            now = f"this one is rank {rank} of {size}"
            before = f"{ranks} ranks made the commit" if ranks != size else f"its value was of {self._place}"
            raise PerRankError(
                name,
                f"{before}, and {now}. Start {ranks} ranks, or say what they resume from by "
                "PerRank(value, on_resize=lambda states, rank, size: ...)",
            )
        elif (state := self.on_resize([states[each] for each in range(ranks)], rank, size)) is not None or (
            self._stateful is None
        ):
            self._load(state)
        self.keep(place)

    def keep(self, place: tuple[int, int]) -> None:
        """Note that the value is of this place among the ranks."""
        self._place = place

    def _load(self, state: Tree) -> None:
        if self._stateful is None:
            self._value = state
        else:
            self._stateful.load_state_dict(state)
