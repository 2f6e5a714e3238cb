"""The steps that run when a script imports an adapter, before ``hvd.init()``.

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

import faulthandler
import functools
import logging
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.request import ProxyHandler, build_opener

from hvdrecover import config as configs
from hvdrecover import heartbeat, stand_in, uncaught
from hvdrecover.config import Config
from hvdrecover.errors import EarlyCollectiveError
from hvdrecover.state.horovod import note_start, rendezvous_alone
from hvdrecover.uncaught import is_library

logger = logging.getLogger(__name__)

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
    """Choose Horovod's controller, connect to the guardian, and replace a lost process."""
    config = configs.read()
    configs.choose_controller(config)
    if config.slot is not None and not heartbeat.watched():
        _attach(*config.slot)
    if config.rejoins and not hvd.is_initialized():
        rendezvous_alone(hvd)
    if config.elastic:
        watch_early_collectives(hvd, config)
    if heartbeat.watched():
        note_start(hvd, heartbeat.initialised, heartbeat.removed, heartbeat.lost_ranks)


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
    uncaught.report_to(notes)
    heartbeat.at_commit(_report_modules)
    heartbeat.at_progress(_report_modules)


def _report_modules() -> None:
    """Report the imported libraries, so that a standby imports them, too.

    This is done at the second commit, as the first one imports libraries itself; in a plain script, at the
    second step.
    """
    is_plain = heartbeat.page.phase == heartbeat.Phase.PLAIN
    if is_plain and heartbeat.page.read().steps < 2:
        heartbeat.at_progress(_report_modules)
    elif not is_plain and heartbeat.page.commits < 2:
        heartbeat.at_commit(_report_modules)
    else:
        names = [name for name, module in sys.modules.items() if _is_library(name, module)]
        heartbeat.notify(modules=[*stand_in.replaced, *names])


def _is_library(name: str, module: Any) -> bool:
    """Return whether a module can be imported before the script runs: it is not part of the script."""
    spec = getattr(module, "__spec__", None)
    if spec is None or name == "__main__":
        return False
    return spec.origin in ("built-in", "frozen") or is_library(str(spec.origin))


class WatchedLibrary:
    """Horovod's native library, which scripts, layers and Horovod's own Python code call collectives through.

    ``look`` takes the name by which scripts call a collective, and the library's function; it returns the
    function to call instead.
    """

    def __init__(self, library: Any, look: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._library = library
        self._look = look

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if match := _COLLECTIVE.match(name):
            found = self._look(match[1], found)
        setattr(self, name, found)  # a script may call it at every step
        return found


def watch_early_collectives(hvd: Any, config: Config) -> None:
    asked = functools.cache(lambda: _joins(config))

    def joins() -> bool:
        return bool(_libraries) and hvd.is_initialized() and asked()

    name = next(each for each in _SKIPPED if hasattr(hvd.mpi_ops, each))
    library = getattr(hvd.mpi_ops, name)
    watched = WatchedLibrary(library, lambda call, function: _refused(function, call, joins))
    _libraries.append((hvd.mpi_ops, name, library, watched))
    setattr(hvd.mpi_ops, name, watched)
    for function in _SKIPPED[name]:
        setattr(hvd, function, _skipped(getattr(hvd, function), joins))
    for function in _REFUSED:
        setattr(hvd, function, _refused(getattr(hvd, function), function, joins))


def training_begins() -> None:
    """Stop watching collectives, as a training function begins."""
    while _libraries:
        module, name, library, watched = _libraries.pop()
        if getattr(module, name) is watched:  # otherwise a state with virtual ranks has wrapped it
            setattr(module, name, library)


def _refused(function: Callable[..., Any], name: str, joins: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if joins():
            raise EarlyCollectiveError(f"hvd.{name}")
        return function(*args, **kwargs)

    return call


def _skipped(function: Callable[..., Any], joins: Callable[[], bool]) -> Callable[..., Any]:
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not joins():
            return function(*args, **kwargs)
        if name != "broadcast_object":
            logger.debug("hvd.%s() does nothing: this process joins a running job and gets its state", name)
            return None
        logger.warning(
            "hvd.broadcast_object() before the training function returns this process's own object: this "
            "process joins a running job, and the other ranks are in their training functions. If all ranks "
            "need the same object, put it into the state"
        )
        return args[0] if args else kwargs["obj"]

    return call


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
