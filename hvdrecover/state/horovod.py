"""Horovod's elastic machinery, the part that is the same for all frameworks.

Horovod is imported when a function is called, so that importing this module costs nothing.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hvdrecover import config
from hvdrecover.errors import ConfigError, RemovedError, RendezvousError
from hvdrecover.state.adapter import Buffer, Past, World

Fault = Literal["peers", "hosts", "numbers"]

_NO_ADASUM = "No Adasum operation enabled"
_JOINED = "is not supported with Join at this time"
# When a rank is lost, Horovod's library ends, and forgets the process sets. What a script then does with one
# fails, but with a ValueError in place of a HorovodInternalError.
_SET_LOST = (
    "Horovod is shutting down.",
    "Process set provided does not exist, or has not been registered.",
    "Process set does not exist or has not been registered.",
)
_REMOVED = "has been removed from elastic job"
_WORD = 8  # bytes of the length before a rank's message
_BLOCK = 4096  # bytes


def version() -> str:
    return metadata.version("horovod")


def rank() -> int:
    """This process's rank, by whichever of Horovod's modules it has initialised; -1 if by none."""
    modules = (sys.modules.get(name) for name in ("horovod.torch", "horovod.tensorflow"))
    return next((int(hvd.rank()) for hvd in modules if hvd is not None and hvd.is_initialized()), -1)


def fault_of(error: BaseException, world: World) -> Fault | None:
    """Classify an error that ended a training function; None if it is an error of the script."""
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    if isinstance(error, HostsUpdatedInterrupt):
        return "hosts"
    set_lost = any(text in str(error) for text in _SET_LOST)
    return "peers" if isinstance(error, HorovodInternalError) or set_lost or world.lost(error) else None


def mistake_of(error: BaseException) -> ConfigError | None:
    """Return the mistake of a script for which Horovod raises an error that looks like a lost rank."""
    if _NO_ADASUM in str(error):
        remedy = "Adasum on CPUs needs MPI: start the job by mpirun, or by horovodrun --mpi"
        mistake = ConfigError("op", remedy)
    elif _JOINED in str(error):
        mistake = ConfigError(
            "hvd.join",
            "a rank has joined, and another rank has called state.commit() or a collective other than "
            "allreduce. Joined ranks cannot take part in these. Call state.commit() on all ranks after "
            "hvd.join() has returned",
        )
    else:
        return None
    return mistake.with_traceback(error.__traceback__)


def hosts_updated() -> Exception:
    from horovod.common.exceptions import HostsUpdatedInterrupt

    interrupt: Exception = HostsUpdatedInterrupt(False)
    return interrupt


class HorovodWorld:
    """The ranks as one of Horovod's framework modules knows them; the base of each adapter's `World`."""

    past = Past()  # shared by all instances

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd

    def rank(self) -> int:
        return int(self._hvd.rank())

    def size(self) -> int:
        return int(self._hvd.size())

    def init(self) -> None:
        """Rendezvous with the other ranks, and make the script's process sets again."""
        made = getattr(self._hvd.mpi_ops._basics, "process_sets", ())  # exists in our build of Horovod
        try:
            self._hvd.init(process_sets=[each for each in made if each.process_set_id is not None])
        except ValueError as error:
            reason = _failure(self._hvd) or str(error)
            if "process set" in reason:
                raise ConfigError(
                    "process_sets",
                    f"{reason}. The ranks of the job have changed, and the process sets "
                    f"{[each.ranks for each in made]} no longer fit. Start the job with enough processes "
                    "(--min-np), or add the sets in the training function, by hvd.add_process_set()",
                ) from error
            kind = RemovedError if _REMOVED in reason else RendezvousError
            raise kind(reason) from error

    def shutdown(self) -> None:
        self._hvd.shutdown()

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        """Return the arrays of all ranks, joined along the first axis; the lengths there may differ."""
        raise NotImplementedError

    def allgather(self, values: Sequence[int], name: str) -> npt.NDArray[np.int64]:
        return self.join(np.array([list(values)], dtype=np.int64), name)

    def send(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        return lambda: self.allgather(values, name)

    def gather(self, mine: bytes, name: str) -> Sequence[Buffer]:
        rest = self.join(np.frombuffer(framed(mine), dtype="<i8"), name).view(np.uint8).data
        found = []
        while rest:
            length = int.from_bytes(rest[:_WORD], "little")
            found.append(rest[_WORD : _WORD + length])
            rest = rest[-(-(length + _WORD) // _BLOCK) * _BLOCK :]
        return found

    def allow_stalls(self, seconds: int) -> None:
        if (function := _own(self._hvd, "horovod_set_stall_shutdown_seconds")) is not None:
            function(seconds)


def framed(mine: bytes) -> bytes:
    """Return bytes in whole blocks after their length: Horovod negotiates each new shape again."""
    blocks = -(-(len(mine) + _WORD) // _BLOCK)
    return len(mine).to_bytes(_WORD, "little") + mine.ljust(blocks * _BLOCK - _WORD, b"\0")


def rendezvous_alone(hvd: Any) -> None:
    """Initialise Horovod without any other rank, and shut it down again.

    From then on ``hvd.init()`` asks the driver for this process's place, as after a reset, and waits until
    the other ranks do so as well. So a process takes the place of one that was lost.
    """
    with config.alone():
        hvd.init()
        hvd.shutdown()


def note_start(
    hvd: Any,
    started: Callable[[int], object],
    removed: Callable[[], object],
    lost: Callable[[str], object],
) -> None:
    """Call ``started(rank)`` at each initialisation, or ``removed()`` if the job has removed this host.

    At the first `HorovodInternalError`, call ``lost(text)``. A script without a training function may catch
    the error, and exit in any way. Its guardian must not take that for an error of the script.
    """
    from horovod.common.exceptions import HorovodInternalError

    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
    init, begin = library.horovod_init, HorovodInternalError.__init__

    def initialise(*args: Any) -> Any:
        result = init(*args)
        if result:
            started(library.horovod_rank())
        elif _REMOVED in _failure(hvd):
            removed()
        return result

    def note(self: HorovodInternalError, *args: Any) -> None:
        begin(self, *args)
        HorovodInternalError.__init__ = begin
        lost(f"HorovodInternalError: {self}")

    library.horovod_init, HorovodInternalError.__init__ = initialise, note


def _own(hvd: Any, name: str) -> Any:
    """A function that our build of Horovod has; None in any other."""
    return getattr(hvd.mpi_ops._basics.MPI_LIB_CTYPES, name, None)


def _failure(hvd: Any) -> str:
    """Return why the last ``hvd.init()`` failed, if Horovod tells."""
    function = _own(hvd, "horovod_initialization_error")
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return str(function().decode(errors="replace"))


@contextmanager
def notifications(state: Any) -> Iterator[None]:
    """Register a state with Horovod: ``state.on_hosts_updated`` is called when hosts come or go."""
    from horovod.common.elastic import notification_manager

    config.bypass_proxy()
    drawn = random.getstate()
    notification_manager.init()  # draws ports from the generator that the run's seed may come from
    random.setstate(drawn)
    notification_manager.register_listener(state)
    try:
        yield
    finally:
        notification_manager.remove_listener(state)
