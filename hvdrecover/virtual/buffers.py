"""The buffers of models, such as batch norm's statistics. Each virtual rank has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from hvdrecover.errors import ConfigError, MismatchError, PerRankError, StepError
from hvdrecover.state.adapter import Tree
from hvdrecover.state.rank_local import Carried

Tensors = dict[str, Any]


class Buffers(ABC):
    """The buffers of all models of a state. They are swapped in for the part of each virtual rank.

    A commit holds the buffers that parts have changed. It does not hold masks and tables that no part writes
    to. An adapter reads and writes one buffer.

    Attributes:
        taken: always 0; see `hvdrecover.state.rank_local.Value`.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._own: dict[int, Tensors] = {}
        self._remember()

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
    def same(self, one: Any, other: Any) -> bool:
        """Return whether two copies have the same bits."""

    def absorb(self) -> None:
        """Give all virtual ranks the changes that the script made outside of parts."""
        for name in self.names():
            tensor = self.read(name)
            if self.same(tensor, _known(name, self._present)):
                continue
            if self._apart and any(name in own for own in self._own.values()):
                raise StepError(
                    name,
                    "this buffer was changed between a step's inner loop and the commit, for example by a "
                    "forward pass in training mode. There, each process has the buffer of another virtual "
                    "rank, so the result would depend on the number of processes. Do it after "
                    "state.commit(), which gives all processes the buffer of virtual rank 0, or call "
                    "model.eval() before",
                )
            self._common[name] = self._present[name] = tensor
            for own in self._own.values():
                own.pop(name, None)

    def swap_in(self, rank: int) -> None:
        """Give the models the buffers of a virtual rank."""
        self._put(self._own.get(rank, {}))

    def swap_out(self, rank: int) -> None:
        """Keep the buffers that a virtual rank has changed."""
        self._present = {name: self.read(name) for name in self.names()}
        own = self._own.setdefault(rank, {})
        for name, each in self._present.items():
            # A buffer that a part has changed is not compared again: that would cost time in each part.
            if name in own or not self.same(each, _known(name, self._common)):
                own[name] = each
        self._apart = True

    # -- as a value of each virtual rank; see `hvdrecover.state.rank_local.Value` -------------------------

    def states(self, carried: Carried) -> dict[int, Tree]:
        self.absorb()
        return {rank: dict(self._own.get(rank, {})) for rank in carried.ranks}

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

    def _remember(self) -> None:
        self._common: Tensors = {name: self.read(name) for name in self.names()}
        self._present = dict(self._common)  # the models' contents
        self._apart = False  # whether other processes have the buffers of other virtual ranks

    def _put(self, own: Mapping[str, Any]) -> None:
        """Give the models some buffers, and the common ones for all others."""
        self._present = {name: own.get(name, _known(name, self._common)) for name in self.names()}
        for name, each in self._present.items():
            self.write(name, each)


def _known(name: str, tensors: Mapping[str, Any]) -> Any:
    if name not in tensors:
        raise ConfigError("buffers", f"{name} was made after the state; make all buffers before the state")
    return tensors[name]
