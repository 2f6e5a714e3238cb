"""Host sources by name.

A new source of this package is a class in a module beside this one and a line in `OURS`. Other packages
attach a source by an entry point in the group ``hvdrecover.host_sources``: its name is what users type, its
object is the class. It is loaded only when a user names it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import ClassVar, Protocol

from hvdrecover.discovery.hosts import Host
from hvdrecover.errors import ConfigError

GROUP = "hvdrecover.host_sources"
OURS = {
    "static": "hvdrecover.discovery.sources.lists:Static",
    "file": "hvdrecover.discovery.sources.lists:File",
    "command": "hvdrecover.discovery.sources.lists:Command",
    "slurm": "hvdrecover.discovery.sources.slurm:Slurm",
    "kubernetes": "hvdrecover.discovery.sources.kubernetes:Kubernetes",
    "lsf": "hvdrecover.discovery.sources.batch:Lsf",
    "pbs": "hvdrecover.discovery.sources.batch:Pbs",
    "sge": "hvdrecover.discovery.sources.batch:GridEngine",
    "cobalt": "hvdrecover.discovery.sources.batch:Cobalt",
    "mpi": "hvdrecover.discovery.sources.mpi:Mpi",
    "tf-config": "hvdrecover.discovery.sources.lists:TfConfig",
}
"""Name: module and class."""


class Source(Protocol):
    """A place where hosts are named: a frozen dataclass, whose fields are its options.

    A field without a default is an argument of ``hvdrecover discover SOURCE``, one with a default is an
    option. A field is a ``str``, an ``int``, a ``bool``, or, as the last argument, a ``tuple[str, ...]`` that
    takes all remaining words; its metadata has a ``help`` and may have a ``metavar``. The first line of
    the class's docstring describes the source to users.

    Attributes:
        every: least seconds between two calls of `hosts`.
        variables: environment variables on which the hosts depend; ``*`` for all.

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

        Called in a separate process, which is killed if it hangs.

        Args:
            environ: the environment.
            timeout: seconds that it may take.

        Raises:
            DiscoveryError: the hosts cannot be found, and why.
        """
        ...


def find(name: str) -> type[Source]:
    """Return the class of a source. This package's own names take precedence over entry points.

    Raises:
        ConfigError: the name is unknown, or its entry point is broken.
    """
    if name in OURS:
        module, _, item = OURS[name].partition(":")
        found: type[Source] = getattr(importlib.import_module(module), item)
        return found
    from importlib import metadata  # here, because it takes longer to import than the rest of a call

    points = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name not in points:
        names = ", ".join([*OURS, *sorted(points.keys() - OURS.keys())])
        raise ConfigError(f"host source '{name}'", f"is unknown (installed: {names})")
    point = points[name]
    package = f" of package {point.dist.name}" if point.dist else ""
    broken = f"entry point '{name} = {point.value}'{package}"
    try:
        found = point.load()
    except Exception as error:  # the module may raise anything on import
        problem = f"{broken} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(f"host source '{name}'", problem) from error
    if not dataclasses.is_dataclass(found) or not hasattr(found, "hosts"):
        problem = f"{broken} must be a dataclass with a method 'hosts'"
        raise ConfigError(f"host source '{name}'", problem)
    return found
