"""Collectives before the training function, in a process that joins a running job.

The other ranks are in their training functions and never answer. So broadcasts of what the state brings
anyway return at once, and other collectives are refused. Horovod's driver counts the rounds of rendezvous. In
the first one all processes have just started, and their collectives meet. In a later one, a process that is
not in its training function yet has joined a running job.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any
from urllib.request import ProxyHandler, build_opener

from hvdrecover import config as configs
from hvdrecover.config import Config
from hvdrecover.elastic.watched_library import WatchedLibrary
from hvdrecover.errors import EarlyCollectiveError

logger = logging.getLogger(__name__)

# Broadcasts that the state makes unnecessary, by the name of the framework's library.
_SKIPPED = {
    "mpi_lib": ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object"),
    "MPI_LIB": ("broadcast_variables", "broadcast_", "broadcast_object"),
}
_REFUSED = ("add_process_set", "remove_process_set")
_PATIENCE = 10.0  # seconds for the driver to answer
# Until `end`: the module and attribute of each watched library, the library, and its watch.
_libraries: list[tuple[Any, str, Any, WatchedLibrary]] = []


def begin(hvd: Any, config: Config) -> None:
    """Watch the collectives of a framework until a training function begins.

    Args:
        hvd: its Horovod module.
        config: the settings of this process.
    """

    @functools.cache
    def asked() -> bool:
        return _joins(config)

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


def end() -> None:
    """A training function begins: from now on, all collectives are Horovod's own."""
    while _libraries:
        module, name, library, watched = _libraries.pop()
        if getattr(module, name) is watched:  # else a state of virtual ranks has put its own watch around it
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
    # The other ranks of a plain script begin again, too, and need its broadcasts. A standby has read its
    # settings before it took the place of a lost process.
    if config.rendezvous is None or configs.read().untrained:
        return False
    host, port = config.rendezvous
    url, opener = f"http://{host}:{port}/round/now", build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=_PATIENCE) as answer:
            return int(answer.read()) > 1
    except (OSError, ValueError):  # the driver of a Horovod without our edits
        return config.rejoins
