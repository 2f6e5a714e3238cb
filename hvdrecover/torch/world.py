"""Horovod's collectives on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import horovod.torch as hvd
import numpy as np
import numpy.typing as npt
import torch

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.elastic.horovod import Ranks


class TorchWorld(Ranks):
    """The ranks, by ``horovod.torch``.

    Every collective has a name of its own: a process that has just started would otherwise number its
    collectives from 0, and wait for ranks that are at another number.
    """

    def __init__(self) -> None:
        super().__init__(hvd)

    def lost(self, error: BaseException) -> bool:
        """Never: ``horovod.torch`` raises ``HorovodInternalError``."""
        return False

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        """Everybody's arrays one after another, joined along the first axis; the lengths there may differ."""
        if self.size() == 1:
            return mine
        joined: npt.NDArray[np.int64] = hvd.allgather(torch.tensor(mine), name=name).numpy()
        return joined

    def begin_allgather(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        """Begin an `allgather`, which Horovod does on its own thread; return what waits for its end."""
        if self.size() == 1:
            return super().begin_allgather(values, name)
        handle = hvd.allgather_async(torch.tensor([list(values)], dtype=torch.int64), name=name)

        def everybodys() -> npt.NDArray[np.int64]:
            joined: npt.NDArray[np.int64] = hvd.synchronize(handle).numpy()
            return joined

        return everybodys

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        """Fill ``buffer``, a uint8 array of the same length on all ranks, with the root's, in place."""
        if self.size() > 1 and len(buffer):
            hvd.broadcast_(torch.from_numpy(buffer), root, name=name)
