"""The interface of host sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from hvdrecover.discovery.hosts import Host


class Source(Protocol):
    """A place where hosts are named: a frozen dataclass, whose fields are what its user says of it.

    A field without a default is an argument of ``hvdrecover discover SOURCE``, one with a default is an
    option. A field is a ``str``, an ``int``, a ``bool``, or, as the last argument, a ``tuple[str, ...]`` that
    takes all words that are left; its metadata has a ``help`` and may have a ``metavar``. The first line of
    the class's docstring tells users what it is.

    Attributes:
        every: seconds between two looks at it, at least.
        variables: names of the environment variables that tell one job's hosts from another's.
    """

    every: ClassVar[float]
    variables: ClassVar[tuple[str, ...]]

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts that are named now, in any order.

        Called in a process of its own, which is killed if it hangs; what hangs a moment is not a fault.

        Args:
            environ: the environment.
            timeout: seconds that it may take.

        Raises:
            DiscoveryError: they can't be found out, and why.
        """
        ...
