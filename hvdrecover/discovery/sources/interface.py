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
        variables: names of the environment variables that tell one job's hosts from another's; ``*`` for all.

    Examples:
        >>> from dataclasses import dataclass, field
        >>> from hvdrecover.discovery import Host, Source
        >>> @dataclass(frozen=True)
        ... class Rack(Source):
        ...     'The machines of a rack, with a slot for each GPU.'
        ...     every = 5.0
        ...     variables = ()
        ...     number: int = field(metadata={"help": "of the rack"})
        ...     gpus: int = field(default=8, metadata={"help": "of each machine", "metavar": "N"})
        ...     def hosts(self, environ, timeout):
        ...         return [Host(f"rack{self.number}-{machine}", self.gpus) for machine in ("a", "b")]
        >>> Rack(7).hosts({}, timeout=5.0)
        [Host(name='rack7-a', slots=8), Host(name='rack7-b', slots=8)]
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
