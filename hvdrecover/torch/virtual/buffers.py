"""The buffers of modules, such as batch norm's statistics, of which each virtual rank has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.interfaces import Tree
from hvdrecover.errors import MismatchError, PerRankError

_Tensors = dict[str, torch.Tensor]
_Slot = tuple[dict[str, Any], str]
"""A module's dict of buffers, and a name in it."""


class Buffers:
    """The buffers of all modules of a state, swapped in for the part of each virtual rank.

    A commit holds what has been changed for any of them: not masks and tables, which no step writes to.

    Args:
        modules: by attribute name; they keep their tensors.

    Attributes:
        taken: always 0; see `hvdrecover.elastic.commits.own.Value`.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._slots = dict(_slots(modules))
        self._own: dict[int, _Tensors] = {}
        self._present: int | None = None  # the virtual rank whose buffers the modules have
        self.taken = 0
        self._remember()

    @property
    def exist(self) -> bool:
        """Return whether there are any."""
        return bool(self._slots)

    def swap_in(self, rank: int) -> None:
        """Give the modules the buffers of a virtual rank."""
        if self._present != rank:
            self._put(self._own.setdefault(rank, {}))
            self._present = rank

    def swap_out(self, rank: int) -> None:
        """Keep the buffers of a virtual rank after its part."""
        mine = self._own[rank]
        with torch.no_grad():
            for name, tensor in self._tensors():
                if name in mine:
                    mine[name].copy_(tensor)
                else:
                    mine[name] = tensor.detach().clone()

    # -- as a value of each virtual rank's own ---------------------------------------------------------------

    def states(self, carried: Carried) -> dict[int, Tree]:
        """Return what has changed of these virtual ranks' buffers, by name."""
        own = {rank: self._own.get(rank, {}) for rank in carried.ranks}
        # Compared rather than told by the tensors' versions, which batch norm does not count up.
        return {
            rank: {
                name: each for name, each in own[rank].items() if not torch.equal(each, self._common[name])
            }
            for rank in carried.ranks
        }

    def made_anew(self, carried: Carried) -> list[int]:
        """None of them: buffers are there as long as their modules."""
        return []

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """Give the modules virtual rank 0's, so that these are what a commit's model has, on all processes.

        What any virtual rank has changed is then part of all states.
        """
        changed = {name for own in states.values() for name in own}
        for own in states.values():
            own.update({name: self._common[name] for name in changed - own.keys()})
        if self._present != 0:
            self._put(states.get(0, {}))
            self._present = None

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        """Go to the buffers of virtual ranks at a commit.

        Raises:
            PerRankError: the commit does not have them.
            MismatchError: the modules have no such buffers.
        """
        for rank in carried.ranks:
            if rank not in states:
                raise PerRankError(
                    "buffers",
                    f"the commit has none of virtual rank {rank}; state.save() knows this process's only, so "
                    "make commits by state.commit()",
                )
            if unknown := sorted(states[rank].keys() - self._slots.keys()):
                raise MismatchError(
                    "buffers", [f"{each}: in the commit, but not in a module" for each in unknown]
                )
            self._own[rank] = dict(states[rank])

    def keep(self, carried: Carried) -> None:
        """Note which virtual ranks are carried out; the modules have what all have in common now."""
        self._own = {rank: each for rank, each in self._own.items() if rank in carried.ranks}
        self._remember()

    # -- inside --------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        self._common: _Tensors = {name: tensor.detach().clone() for name, tensor in self._tensors()}
        self._present = None

    def _put(self, own: _Tensors) -> None:
        """Give the modules some buffers; of those that are not among them, what all have in common."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(own.get(name, self._common[name]))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (buffers, key) in self._slots.items():
            tensor = buffers[key]
            if tensor is not None:
                yield name, tensor


def _slots(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, _Slot]]:
    for attribute, module in modules.items():
        for prefix, each in module.named_modules():
            for key in each._buffers:
                yield ".".join(filter(None, (attribute, prefix, key))), (each._buffers, key)
