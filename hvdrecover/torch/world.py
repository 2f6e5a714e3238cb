"""Horovod's collectives on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import horovod.torch as hvd
import numpy as np
import numpy.typing as npt
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.state.horovod import HorovodWorld


class TorchWorld(HorovodWorld):
    """The ranks, by ``horovod.torch``.

    Every collective has a unique name: a process that has just started would otherwise number its
    collectives from 0, and wait for ranks that are at another number.
    """

    def __init__(self) -> None:
        super().__init__(hvd)

    def lost(self, error: BaseException) -> bool:
        return False  # ``horovod.torch`` raises ``HorovodInternalError``

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        return self._begin_join(mine, name)()

    def send(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        return self._begin_join(np.array([list(values)], dtype=np.int64), name)

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        if self.size() > 1 and len(buffer):
            hvd.broadcast_(torch.from_numpy(buffer), root, name=name)

    def _begin_join(self, mine: npt.NDArray[np.int64], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        if self.size() == 1:
            return lambda: mine
        try:
            handle = hvd.allgather_async(torch.tensor(mine), name=name)
        except HorovodInternalError as error:
            return partial(_fail, error)
        return lambda: hvd.synchronize(handle).numpy()


def _fail(error: Exception) -> NoReturn:
    raise error
