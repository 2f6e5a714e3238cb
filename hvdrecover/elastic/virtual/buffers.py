"""The buffers of models, such as batch norm's statistics, of which each virtual rank has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdrecover.checkpoint.digest import digest_numbers
from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.interfaces import Tensor, Tree
from hvdrecover.errors import ConfigError, MismatchError, PerRankError, StepError

Tensors = dict[str, Tensor]


class Buffers:
    """The buffers of all models of a state, swapped in for the part of each virtual rank.

    A commit holds what has been changed for any of them: not masks and tables, which no step writes to. An
    adapter says how one of them is read and written.

    Attributes:
        taken: always 0; see `hvdrecover.elastic.commits.own.Value`.
        absorbed: tells what the script has changed outside of parts; 0 if nothing.
    """

    def __init__(self) -> None:
        self._own: dict[int, Tensors] = {}
        self._left: Mapping[str, Any] = {}  # what the models have, but for changes by the script
        self._present: int | None = None  # the virtual rank whose buffers the models have
        self._apart = False  # whether these are another virtual rank's on other processes
        self.taken = self.absorbed = 0
        self._remember()

    # -- said by an adapter ----------------------------------------------------------------------------------

    def names(self) -> Iterable[str]:
        """Return the names of the buffers that hold something."""
        raise NotImplementedError

    def knows(self, name: str) -> bool:
        """Return whether the models have such a buffer."""
        raise NotImplementedError

    def read(self, name: str, memory: Tensor | None = None) -> Tensor:
        """Return a copy of a buffer; it may be made in the memory of an earlier one."""
        raise NotImplementedError

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into a buffer."""
        raise NotImplementedError

    def bits(self, tensor: Tensor) -> bytes:
        """Return the bytes of a copy of a buffer."""
        raise NotImplementedError

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a copy, for an adapter whose `read` writes over earlier ones."""
        return tensor

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Return whether two copies of a buffer have the same bits."""
        return self.bits(one) == self.bits(other)

    def changed(self, copies: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the buffers that are not the same as their copies."""
        return [name for name, each in copies.items() if not self.same(self.read(name), each)]

    # -- steps -----------------------------------------------------------------------------------------------

    @property
    def exist(self) -> bool:
        """Return whether there are any."""
        return any(True for _ in self.names())

    def absorb(self) -> None:
        """Take what the script has changed outside of parts, as a count of averages: all ranks have it.

        Raises:
            ConfigError: a buffer was made since the state was.
            StepError: it has changed statistics of one virtual rank.
        """
        changed = self.changed({name: self._known(name, self._left) for name in self.names()})
        for name in changed:
            if self._apart and not self.same(self._left[name], self._known(name, self._common)):
                raise StepError(
                    name,
                    "this buffer was changed between a step's inner loop and the commit, for example by a "
                    "forward pass in training mode. There, each process has the buffer of another virtual "
                    "rank, so the result would depend on the number of processes. Do it after "
                    "state.commit(), which gives all processes the buffer of virtual rank 0, or call "
                    "model.eval() before",
                )
            self._common[name] = self.read(name)
            self.absorbed = digest_numbers(
                self.absorbed.to_bytes(8, signed=True) + self.bits(self._common[name])
            )[0]
            for own in self._own.values():
                own.pop(name, None)
        self._left = {**self._left, **{name: self._common[name] for name in changed}}

    def swap_in(self, rank: int) -> None:
        """Give the models the buffers of a virtual rank."""
        if self._present != rank:
            self._put(self._own.setdefault(rank, {}))
            self._present = rank

    def swap_out(self, rank: int) -> None:
        """Keep the buffers of a virtual rank after its part."""
        mine = self._own[rank]
        for name in self.names():
            mine[name] = self.read(name, mine.get(name))
            if mine[name].shape != self._known(name, self._common).shape:
                raise _unsteady(name)
        self._left = mine
        self._apart = True

    # -- as a value of each virtual rank's own ---------------------------------------------------------------

    def states(self, carried: Carried) -> dict[int, Tree]:
        """Return what has changed of these virtual ranks' buffers, by name."""
        self.absorb()
        own = {rank: self._own.get(rank, {}) for rank in carried.ranks}
        return {
            rank: {name: each for name, each in own[rank].items() if not self.same(each, self._common[name])}
            for rank in carried.ranks
        }

    def made_anew(self, carried: Carried) -> list[int]:
        """None of them: buffers are there as long as their models."""
        return []

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """Give the models virtual rank 0's, so that these are what a commit's model has, on all processes.

        What any virtual rank has changed is then part of all states.
        """
        changed = {name for own in states.values() for name in own}
        for own in states.values():
            own.update({name: self._common[name] for name in changed - own.keys()})
        if self._present != 0:
            self._put(states.get(0, {}))
            self._present = None
        self._apart = False

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        """Go to the buffers of virtual ranks at a commit.

        Raises:
            PerRankError: the commit does not have them.
            MismatchError: the models have no such buffers.
        """
        for rank in carried.ranks:
            if rank not in states:
                raise PerRankError(
                    "buffers",
                    f"the commit has none of virtual rank {rank}; state.save() knows this process's only, so "
                    "make commits by state.commit()",
                )
            if unknown := sorted(each for each in states[rank] if not self.knows(each)):
                raise MismatchError(
                    "buffers", [f"{each}: in the commit, but not in a model" for each in unknown]
                )
            # Several may have been given one copy of what all have in common.
            self._own[rank] = {name: self.copied(each) for name, each in states[rank].items()}

    def keep(self, carried: Carried) -> None:
        """Note which virtual ranks are carried out; the models have what all have in common now."""
        self._own = {rank: each for rank, each in self._own.items() if rank in carried.ranks}
        self._remember()

    def stand_in(self, rank: int, state: Tree) -> Callable[[], None]:
        """Give the models the buffers that a virtual rank begins with; return what puts all back."""
        before = {name: self.read(name) for name in self.names()}
        present, self._present = self._present, None
        self._put(state)

        def put_back() -> None:
            self._put(before)
            self._present = present

        return put_back

    # -- inside ----------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        self._common: Tensors = {name: self.read(name) for name in self.names()}
        self._left = self._common
        self._present = None
        self._apart = False
        self.absorbed = 0

    def _put(self, own: Mapping[str, Any]) -> None:
        """Give the models some buffers; of those that are not among them, what all have in common."""
        self._left = {name: own.get(name, self._known(name, self._common)) for name in self.names()}
        for name, each in self._left.items():
            self.write(name, each)

    def _known(self, name: str, tensors: Mapping[str, Any]) -> Any:
        if name not in tensors:
            raise _unsteady(name)
        return tensors[name]


def _unsteady(name: str) -> ConfigError:
    return ConfigError(
        "buffers",
        f"{name} was made, or has got another shape, since the state was made; each virtual rank has its "
        "own, so make it before the state, and keep its shape",
    )
