"""The buffers of models, such as batch norm's statistics. Each virtual rank has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdrecover.checkpoint.digest import digest_numbers
from hvdrecover.errors import ConfigError, MismatchError, PerRankError, StepError
from hvdrecover.state.adapter import Tree
from hvdrecover.state.rank_local import Carried

Tensors = dict[str, Any]


class Buffers(ABC):
    """The buffers of all models of a state. They are swapped in for the part of each virtual rank.

    A commit holds the buffers that changed for any virtual rank. It does not hold masks and tables that no
    step writes to. An adapter reads and writes one buffer.

    Attributes:
        taken: always 0; see `hvdrecover.state.rank_local.Value`.
        absorbed: a digest of the script's changes outside of parts; 0 without any.
    """

    absorbed: int
    _left: Mapping[str, Any]  # the models' contents, unless the script changed them

    def __init__(self) -> None:
        self.taken = 0
        self._own: dict[int, Tensors] = {}
        self._remember()

    # -- an adapter's part -----------------------------------------------------------------------------------

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of the buffers."""

    @abstractmethod
    def read(self, name: str) -> Any:
        """Return a copy of a buffer."""

    @abstractmethod
    def write(self, name: str, tensor: Any) -> None:
        """Copy a tensor into a buffer."""

    @abstractmethod
    def bits(self, tensor: Any) -> bytes:
        """Return the bytes of a copy."""

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two copies have the same bits."""
        return self.bits(one) == self.bits(other)

    def changed(self, copies: Mapping[str, Any]) -> list[str]:
        """Return the names of the buffers that differ from their copies."""
        return [name for name, each in copies.items() if not self.same(self.read(name), each)]

    # -- steps -----------------------------------------------------------------------------------------------

    def absorb(self) -> None:
        """Give all virtual ranks the changes that the script made outside of parts."""
        changed = self.changed({name: _known(name, self._left) for name in self.names()})
        for name in changed:
            if self._apart and not self.same(self._left[name], self._common[name]):
                raise StepError(
                    name,
                    "this buffer was changed between a step's inner loop and the commit, for example by a "
                    "forward pass in training mode. There, each process has the buffer of another virtual "
                    "rank, so the result would depend on the number of processes. Do it after "
                    "state.commit(), which gives all processes the buffer of virtual rank 0, or call "
                    "model.eval() before",
                )
            self._common[name] = self.read(name)
            before = self.absorbed.to_bytes(8, signed=True)
            self.absorbed = digest_numbers(before + self.bits(self._common[name]))[0]
            for own in self._own.values():
                own.pop(name, None)
        self._left = {**self._left, **{name: self._common[name] for name in changed}}

    def swap_in(self, rank: int) -> None:
        """Give the models the buffers of a virtual rank."""
        self._put(self._own.setdefault(rank, {}))

    def swap_out(self, rank: int) -> None:
        """Keep the buffers of a virtual rank after its part."""
        self._own[rank] = self._left = {name: self.read(name) for name in self.names()}
        for name, each in self._left.items():
            if each.shape != _known(name, self._common).shape:
                raise _unsteady(name)
        self._apart = True

    # -- as a value of each virtual rank; see `hvdrecover.state.rank_local.Value` -------------------------

    def states(self, carried: Carried) -> dict[int, Tree]:
        """Return the changed buffers of these virtual ranks, by name."""
        self.absorb()
        return {
            rank: {
                name: each
                for name, each in self._own.get(rank, {}).items()
                if not self.same(each, self._common[name])
            }
            for rank in carried.ranks
        }

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """Give the models virtual rank 0's buffers, so that a commit's model is the same on all processes.

        Buffers that any virtual rank changed become part of all states.
        """
        changed = {name for own in states.values() for name in own}
        for own in states.values():
            own.update({name: self._common[name] for name in changed - own.keys()})
        self._put(states.get(0, {}))
        self._apart = False

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        """Go to the buffers of virtual ranks at a commit."""
        for rank in carried.ranks:
            if rank not in states:
                raise PerRankError(
                    "buffers",
                    f"the commit has none of virtual rank {rank}; state.save() knows this process's only, so "
                    "make commits by state.commit()",
                )
            if unknown := sorted(states[rank].keys() - set(self.names())):
                raise MismatchError(
                    "buffers", [f"{each}: in the commit, but not in a model" for each in unknown]
                )
            self._own[rank] = dict(states[rank])

    def keep(self, carried: Carried) -> None:
        """Note which virtual ranks are carried out; the models have the common buffers now."""
        self._own = {rank: each for rank, each in self._own.items() if rank in carried.ranks}
        self._remember()

    def stand_in(self, rank: int, state: Tree) -> Callable[[], None]:
        """Give the models the buffers that a virtual rank begins with; return the undo."""
        before = {name: self.read(name) for name in self.names()}
        self._put(state)
        return lambda: self._put(before)

    # -- inside ----------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        self._common: Tensors = {name: self.read(name) for name in self.names()}
        self._left = self._common
        self._apart = False  # whether other processes have the buffers of other virtual ranks
        self.absorbed = 0

    def _put(self, own: Mapping[str, Any]) -> None:
        """Give the models some buffers, and the common ones for all others."""
        self._left = {name: own.get(name, _known(name, self._common)) for name in self.names()}
        for name, each in self._left.items():
            self.write(name, each)


def _known(name: str, tensors: Mapping[str, Any]) -> Any:
    if name not in tensors:
        raise _unsteady(name)
    return tensors[name]


def _unsteady(name: str) -> ConfigError:
    return ConfigError(
        "buffers",
        f"{name} was made, or has got another shape, since the state was made; each virtual rank has its "
        "own, so make it before the state, and keep its shape",
    )
