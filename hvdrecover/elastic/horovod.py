"""Horovod's elastic machinery, the part that is the same for all frameworks.

Horovod is imported when a function is called, so that importing this module costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Literal

from hvdrecover.elastic.interfaces import World

Fault = Literal["peers", "hosts"]


def version() -> str:
    """The version of the installed Horovod, with the local label that tells builds apart."""
    return metadata.version("horovod")


def fault_of(error: BaseException, world: World) -> Fault | None:
    """What an error that ended a training function means.

    Args:
        error: the error.
        world: the ranks.

    Returns:
        ``peers`` if a collective failed because ranks were lost, ``hosts`` if hosts have come or gone without
        a loss, None if it is an error of the user's own.
    """
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    if isinstance(error, HostsUpdatedInterrupt):
        return "hosts"
    return "peers" if isinstance(error, HorovodInternalError) or world.lost(error) else None


def hosts_updated() -> Exception:
    """The exception that says that hosts have come or gone."""
    from horovod.common.exceptions import HostsUpdatedInterrupt

    interrupt: Exception = HostsUpdatedInterrupt(False)
    return interrupt


class Ranks:
    """The ranks as each of Horovod's framework modules knows them; what a `World` is made upon.

    Args:
        hvd: the module, such as ``horovod.torch``.
    """

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd

    def rank(self) -> int:
        """This process's rank."""
        return int(self._hvd.rank())

    def size(self) -> int:
        """Number of ranks."""
        return int(self._hvd.size())

    def init(self) -> None:
        """Meet the other ranks."""
        self._hvd.init()

    def shutdown(self) -> None:
        """Part from the other ranks."""
        self._hvd.shutdown()


@contextmanager
def notifications(state: Any) -> Iterator[None]:
    """Have Horovod's driver tell a state when hosts come or go, by ``state.on_hosts_updated``."""
    from horovod.common.elastic import notification_manager

    notification_manager.init()
    notification_manager.register_listener(state)
    try:
        yield
    finally:
        notification_manager.remove_listener(state)
