"""Horovod in a job of one process, in which tests of torch and of TensorFlow may run one after the other.

Each of Horovod's two libraries has to be initialised; its Python that knows which ranks make a set is there
once, and asks the library that was imported last.
"""

from __future__ import annotations

from typing import Any

from horovod.common import process_sets

from hvdrecover.state.adapter import Past
from hvdrecover.state.horovod import HorovodWorld


def turn_to(hvd: Any) -> None:
    """Have sets of processes ask a framework's library: ``horovod.torch``'s, or ``horovod.tensorflow``'s."""
    process_sets._setup(hvd.mpi_ops._basics)


def start() -> None:
    HorovodWorld.past = Past()


def init(hvd: Any) -> None:
    """Initialise a framework's library, if it isn't."""
    turn_to(hvd)
    hvd.init()
