"""Horovod in a job of one process, for tests of torch and of TensorFlow one after the other."""

from __future__ import annotations

from typing import Any

from horovod.common import process_sets

from hvdrecover.state.adapter import Past
from hvdrecover.state.horovod import HorovodWorld


def turn_to(hvd: Any) -> None:
    """Have sets of processes ask a framework's library: ``horovod.torch``'s, or ``horovod.tensorflow``'s."""
    # Its Python is there once for both, and asks the library that was imported last.
    process_sets._setup(hvd.mpi_ops._basics)


def start() -> None:
    HorovodWorld.past = Past()


def init(hvd: Any) -> None:
    """Initialise a framework's library, if it isn't."""
    turn_to(hvd)
    hvd.init()
