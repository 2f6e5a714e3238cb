"""Horovod's collectives on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

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

    def allgather(self, values: Sequence[int], name: str) -> npt.NDArray[np.int64]:
        """Everybody's values, as int64 of shape ``[size, len(values)]``."""
        mine = torch.tensor([list(values)], dtype=torch.int64)
        gathered: npt.NDArray[np.int64] = (
            mine if self.size() == 1 else hvd.allgather(mine, name=name)
        ).numpy()
        return gathered

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        """Fill ``buffer``, a uint8 array of the same length on all ranks, with the root's, in place."""
        if self.size() > 1 and len(buffer):
            hvd.broadcast_(torch.from_numpy(buffer), root, name=name)
