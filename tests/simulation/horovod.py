"""Horovod's collectives, simulated.

If a process is lost, the others' collectives fail; a collective that was under way may have come through on
some ranks only. If a rank says nothing for longer than the others wait, they give it up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
from horovod.common.exceptions import HorovodInternalError

from hvdrecover.errors import RemovedError, RendezvousError
from hvdrecover.state.adapter import Past
from tests.fakes.framework import FakeFramework
from tests.simulation.system import Running

if TYPE_CHECKING:
    from tests.simulation.driver import Slot


@dataclass
class _Call:
    """One collective, with the entry of each rank."""

    signature: tuple[Any, ...]
    entries: dict[int, Any] = field(default_factory=dict)


@dataclass
class Ring:
    """The ranks of one rendezvous."""

    members: list[SimulatedWorld]
    calls: dict[int, _Call] = field(default_factory=dict)
    broken: bool = False  # whether a rank has left, so that collectives fail which it has not called
    torn: bool = False  # whether it was lost, so that collectives fail on some ranks though all called them

    def tear(self) -> None:
        """Lose the connections of a rank."""
        self.broken = self.torn = True


class SimulatedWorld:
    """The ranks as one process sees them; see `hvdrecover.state.adapter.World`."""

    def __init__(self, slot: Slot, process: Running) -> None:
        self.job = slot.driver.job
        self.slot = slot
        self.process = process
        self.past = Past()
        self.framework = FakeFramework()  # the framework of the process
        self.ring: Ring | None = None  # the ranks that it has met; None before `init` and after `shutdown`
        self.at_init = False  # whether it waits for the others
        self.refused = self.removed = False  # whether the rendezvous has failed; whether it has no place
        self._rank = 0
        self._position = 0
        self._patience = math.inf
        self._scheduler = self.job.cluster.scheduler

    # -- World -------------------------------------------------------------------------------------------

    def rank(self) -> int:
        self._there()
        return self._rank

    def size(self) -> int:
        return len(self._there().members)

    def init(self) -> None:
        assert self.ring is None, "init() without a shutdown() before it"
        self._scheduler.pause()
        self.at_init, self.refused = True, False
        self.removed = self.removed or self.slot.is_removed  # whether the driver has given up its slot
        self.slot.driver.meet()
        self._scheduler.wait(lambda: self.ring is not None or self.refused or self.removed)
        self.at_init = False
        if self.removed:
            raise RemovedError("the host has been removed from elastic job")
        if self.ring is None:
            raise RendezvousError("a rank was lost at the rendezvous")

    def joins(self, ring: Ring, rank: int) -> None:
        """Take a place in a ring; called by the driver."""
        self.ring, self._rank, self._position = ring, rank, 0

    def shutdown(self) -> None:
        self._scheduler.pause()
        self.leave()

    def leave(self, *, torn: bool = False) -> None:
        """The others' collectives fail from now on."""
        if self.ring is not None:
            self.ring.broken = True
            self.ring.torn = self.ring.torn or torn
            self.ring = None

    def allow_stalls(self, seconds: int) -> None:
        self._patience = seconds or math.inf

    def lost(self, error: BaseException) -> bool:
        return False

    def allgather(self, values: Sequence[int], name: str) -> npt.NDArray[np.int64]:
        return self.send(values, name)()

    def send(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        row = np.array(values, dtype=np.int64)
        try:
            rows = self._enter(("allgather", len(row), name), row)
        except HorovodInternalError as error:
            return functools.partial(_fail, error)
        return lambda: np.stack(rows())

    def gather(self, mine: bytes, name: str) -> list[bytes]:
        return self._enter(("gather", name), mine)()

    def broadcast(self, buffer: npt.NDArray[np.uint8], root: int, name: str) -> None:
        mine = buffer.copy() if self._rank == root else None
        entries = self._enter(("broadcast", root, len(buffer), name), mine)()
        buffer[...] = entries[root]

    def allreduce(self, array: npt.NDArray[Any], name: str = "gradient") -> npt.NDArray[Any]:
        """The sum over all ranks."""
        return np.sum(self._enter(("allreduce", array.shape, name), array.copy())(), axis=0)

    # -- inside ------------------------------------------------------------------------------------------

    def _there(self) -> Ring:
        assert self.ring is not None, "init() has not been called"
        return self.ring

    def _enter(self, signature: tuple[Any, ...], mine: Any) -> Callable[[], list[Any]]:
        """Bring something to a collective; return what waits for all others."""
        ring, scheduler = self._there(), self._scheduler
        self.job.cluster.at_collective(self, signature[-1])
        scheduler.pause()
        if ring.broken:
            raise HorovodInternalError(f"{signature[-1]}: a rank was lost")
        call = ring.calls.setdefault(self._position, _Call(signature))
        self._position += 1
        if call.signature != signature:
            scheduler.fail(f"rank {self._rank} is in {signature}, others are in {call.signature}")
        call.entries[self._rank] = mine

        def outcome() -> list[Any]:
            size = len(ring.members)
            if not scheduler.wait(lambda: len(call.entries) == size or ring.broken, self._patience):
                silent = size - len(call.entries)
                scheduler.say(f"gives up {silent} of {size} ranks, which are silent in {signature[-1]}")
                ring.tear()
            # A rank that is lost now may have sent its part to some of the others.
            if len(call.entries) < size or (ring.torn and scheduler.dice.random() < 0.5):
                raise HorovodInternalError(f"{signature[-1]}: a rank was lost")
            return [call.entries[rank] for rank in range(size)]

        return outcome


def _fail(error: Exception) -> NoReturn:
    raise error
