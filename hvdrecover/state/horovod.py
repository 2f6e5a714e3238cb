"""Horovod's elastic machinery, the part that is the same for all frameworks.

Horovod is imported when a function is called, so that importing this module costs nothing.

When a script imports an adapter, before ``hvd.init()``:

1. Choose Horovod's controller, and make this process known to its guardian.
2. A restarted process replaces the lost one: it initialises Horovod alone once, and the next ``hvd.init()``
   asks the driver for its rank.
3. Until its training function begins, a process that joins a running job must not call a collective: the
   other ranks are in their training functions, and never answer. So broadcasts of values that the state sends
   later return at once, and other collectives raise an error. Horovod's driver counts the rendezvous. In the
   first one, all processes have just started, and collectives work. In a later one, a process outside its
   training function has joined a running job.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import logging
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, Literal, NoReturn
from urllib.request import ProxyHandler, build_opener

import numpy as np
import numpy.typing as npt

from hvdrecover import config as configs
from hvdrecover import heartbeat, stand_in
from hvdrecover.config import Config
from hvdrecover.errors import ConfigError, EarlyCollectiveError, RemovedError, RendezvousError
from hvdrecover.state.adapter import Buffer, Past, World
from hvdrecover.texts import is_library

logger = logging.getLogger(__name__)

Fault = Literal["peers", "hosts", "numbers"]

# When a rank is lost, Horovod's library ends, and forgets the process sets. A script's next call with one
# fails, but with a ValueError in place of a HorovodInternalError.
_SET_LOST = (
    "Horovod is shutting down.",
    "Process set provided does not exist, or has not been registered.",
    "Process set does not exist or has not been registered.",
)
_REMOVED = "has been removed from elastic job"
_WORD = 8  # bytes of the length before a rank's message
_BLOCK = 4096  # bytes
_world: World | None = None  # whose waits are limited


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
    if "No Adasum operation enabled" in str(error):
        remedy = "Adasum on CPUs needs MPI: start the job by mpirun, or by horovodrun --mpi"
        mistake = ConfigError("op", remedy)
    elif "is not supported with Join at this time" in str(error):
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
        return self.join(np.array([values], dtype=np.int64), name)

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


def limit_waits(world: World | None = None) -> None:
    """Limit the time that collectives wait for a silent rank, as this process's page says."""
    # A rank that hangs is killed by its guardian. The others must have left their collectives by then, or
    # they would be taken for hanging as well. There is no limit while a rank may be busy for long: before the
    # job's first commit, in a recovery, and in a pause.
    global _world
    _world = world or _world
    if _world is not None and heartbeat.watched():
        _world.allow_stalls(heartbeat.stall_seconds())


@contextmanager
def paused() -> Iterator[None]:
    """Cover a phase that may take long without a sign of progress, such as an evaluation.

    All ranks must enter it, also those that have nothing to do in it: they wait for the others afterwards,
    and that wait does not count as a hang until there is progress again.

    Examples:
        >>> with recover.paused():
        ...     evaluated = sum(range(1000))  # a long evaluation
    """
    with heartbeat.paused():
        limit_waits()
        try:
            yield
        finally:
            heartbeat.at_progress(limit_waits)


def rendezvous_alone(hvd: Any) -> None:
    with configs.alone():
        hvd.init()
        hvd.shutdown()  # the next ``hvd.init()`` asks the driver for this process's place, as after a reset


def _note_start(hvd: Any) -> None:
    """Tell the guardian of each initialisation, and of the first `HorovodInternalError`."""
    # A script without a training function may catch the error, and exit in any way. Its guardian must not
    # take that for an error of the script.
    from horovod.common.exceptions import HorovodInternalError

    library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
    init, begin = library.horovod_init, HorovodInternalError.__init__

    def initialise(*args: Any) -> Any:
        result = init(*args)
        if result:
            heartbeat.initialised(library.horovod_rank())
        elif _REMOVED in _failure(hvd):
            heartbeat.enter(heartbeat.Phase.REMOVED)
        return result

    def note(self: HorovodInternalError, *args: Any) -> None:
        begin(self, *args)
        HorovodInternalError.__init__ = begin
        heartbeat.lost_ranks(f"HorovodInternalError: {self}")

    library.horovod_init, HorovodInternalError.__init__ = initialise, note


def _own(hvd: Any, name: str) -> Any:
    """Return a function that only our build of Horovod has; None in any other."""
    return getattr(hvd.mpi_ops._basics.MPI_LIB_CTYPES, name, None)


def _failure(hvd: Any) -> str:
    function = _own(hvd, "horovod_initialization_error")
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return str(function().decode(errors="replace"))


@contextmanager
def notifications(state: Any) -> Iterator[None]:
    """Register a state with Horovod: ``state.on_hosts_updated`` is called when hosts come or go."""
    from horovod.common.elastic import notification_manager

    configs.bypass_proxy()
    drawn = random.getstate()
    notification_manager.init()  # draws ports from the generator that the run's seed may come from
    random.setstate(drawn)
    notification_manager.register_listener(state)
    try:
        yield
    finally:
        notification_manager.remove_listener(state)


# -- the start of a process, when a script imports an adapter ----------------------------------------------

_COLLECTIVE = re.compile(
    r"horovod_(?:torch_)?((?:grouped_)?(?:allreduce|allgather|broadcast|alltoall|reducescatter)|join|barrier)"
    "(?:_|$)"
)

# Broadcasts that the state makes unnecessary, by the name of the framework's library.
_SKIPPED = {
    "mpi_lib": ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object"),
    "MPI_LIB": ("broadcast_variables", "broadcast_", "broadcast_object"),
}
_REFUSED = ("add_process_set", "remove_process_set")
_PATIENCE = 10.0  # seconds for the driver to answer
# Until `training_begins`: the module and attribute of each watched library, the library, and its watch.
_libraries: list[tuple[Any, str, Any, WatchedLibrary]] = []


def join(hvd: Any) -> None:
    """Do the steps of the start of a process."""
    config = configs.read()
    configs.choose_controller(config)
    if config.slot is not None and not heartbeat.watched():
        _attach(*config.slot)
    if config.rejoins and not hvd.is_initialized():
        rendezvous_alone(hvd)
    if config.elastic:
        watch_early_collectives(hvd, config)
    if heartbeat.watched():
        _note_start(hvd)


def _attach(page: int, stacks: int, notes: int, events: int) -> None:
    with suppress(ValueError):  # outside the main thread
        # After the interpreter has ended, this setting is in force. By default, the signal would kill the
        # process then.
        signal.signal(configs.STACKS_SIGNAL, signal.SIG_IGN)
    try:
        faulthandler.register(configs.STACKS_SIGNAL, file=stacks, all_threads=True)
        heartbeat.attach(page, notes, events)
    except (OSError, ValueError):  # a program in between has closed descriptors that it did not know
        return
    configs.keep_to_this_process(page, stacks, notes, events)
    heartbeat.report_errors_to(notes)
    heartbeat.at_commit(_report_modules)
    heartbeat.at_progress(_report_modules)


def _report_modules() -> None:
    """Report the imported libraries, so that a standby imports them, too."""
    # At the second commit, as the first one imports libraries itself; in a plain script, at the second step.
    is_plain = heartbeat.page.phase == heartbeat.Phase.PLAIN
    if is_plain and heartbeat.page.read().steps < 2:
        heartbeat.at_progress(_report_modules)
    elif not is_plain and heartbeat.page.commits < 2:
        heartbeat.at_commit(_report_modules)
    else:
        # A copy: a module that loads lazily may import others when it is asked for its `__spec__`.
        names = [name for name, module in sys.modules.copy().items() if _is_library(name, module)]
        heartbeat.notify(modules=[*stand_in.replaced, *names])


def _is_library(name: str, module: Any) -> bool:
    """Return whether a module can be imported before the script runs."""
    spec = getattr(module, "__spec__", None)
    if spec is None or name == "__main__":
        return False
    return spec.origin in ("built-in", "frozen") or is_library(str(spec.origin))


class WatchedLibrary:
    """Horovod's native library, through which scripts and Horovod's own Python code call collectives."""

    def __init__(self, library: Any, look: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._library = library
        # Takes a collective's name in scripts and its function; returns the function to call instead.
        self._look = look

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if match := _COLLECTIVE.match(name):
            found = self._look(match[1], found)
        setattr(self, name, found)  # a script may call it at every step
        return found


def _refuse(call: str, /, *args: Any, **kwargs: Any) -> NoReturn:
    raise EarlyCollectiveError(f"hvd.{call}")


def watch_early_collectives(hvd: Any, config: Config) -> None:
    joins = functools.cache(lambda: _joins(config))

    def early(call: str, function: Callable[..., Any], instead: Callable[..., Any] = _refuse) -> Any:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            is_early = _libraries and hvd.is_initialized() and joins()
            return instead(call, *args, **kwargs) if is_early else function(*args, **kwargs)

        return watched

    name = next(each for each in _SKIPPED if hasattr(hvd.mpi_ops, each))
    library = getattr(hvd.mpi_ops, name)
    watch = WatchedLibrary(library, early)
    _libraries.append((hvd.mpi_ops, name, library, watch))
    setattr(hvd.mpi_ops, name, watch)
    for call in (*_SKIPPED[name], *_REFUSED):
        setattr(hvd, call, early(call, getattr(hvd, call), _refuse if call in _REFUSED else _skip))


def training_begins() -> None:
    """Stop watching early collectives."""
    while _libraries:
        module, name, library, watched = _libraries.pop()
        if getattr(module, name) is watched:  # otherwise a state with virtual ranks has wrapped it
            setattr(module, name, library)


def _skip(call: str, /, *args: Any, **kwargs: Any) -> Any:
    if call != "broadcast_object":
        logger.debug("hvd.%s() does nothing: this process joins a running job and gets its state", call)
        return None
    logger.warning(
        "hvd.broadcast_object() before the training function returns this process's own object: this process "
        "joins a running job, and the other ranks are in their training functions. If all ranks need the "
        "same object, put it into the state"
    )
    return args[0] if args else kwargs["obj"]


def _joins(config: Config) -> bool:
    """Return whether the job was already running when this process joined it."""
    # In a plain script all ranks start again, and need these broadcasts. Read the settings again: a standby
    # read its own before it replaced a lost process.
    if config.rendezvous is None or configs.read().untrained:
        return False
    host, port = config.rendezvous
    url, opener = f"http://{host}:{port}/round/now", build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PATIENCE) as answer:
            return int(answer.read()) > 1
    except (OSError, ValueError):  # the driver of a Horovod without our edits
        return config.rejoins
