"""Host sources by name.

A source of this package is a function in a module beside this one and a line in `OURS`. Other packages attach
a source by an entry point in the group ``hvdrecover.host_sources``. It is loaded only when a user names it.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdrecover.discovery.hosts import Host
from hvdrecover.errors import ConfigError

GROUP = "hvdrecover.host_sources"
OURS = {
    "static": "hvdrecover.discovery.sources.lists:static",
    "file": "hvdrecover.discovery.sources.lists:file",
    "command": "hvdrecover.discovery.sources.lists:command",
    "slurm": "hvdrecover.discovery.sources.slurm:slurm",
    "kubernetes": "hvdrecover.discovery.sources.kubernetes:kubernetes",
    "lsf": "hvdrecover.discovery.sources.lists:lsf",
    "pbs": "hvdrecover.discovery.sources.lists:pbs",
    "sge": "hvdrecover.discovery.sources.lists:sge",
    "mpi": "hvdrecover.discovery.sources.lists:mpi",
    "tf-config": "hvdrecover.discovery.sources.lists:tf_config",
}


@dataclass(frozen=True)
class Source:
    """A function that returns hosts, and the values of its options; see `source`."""

    function: Callable[..., list[Host]]
    every: float = 5.0
    variables: tuple[str, ...] = ("*",)
    if_empty: str = ""
    helps: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, environ: Mapping[str, str], timeout: float, **options: Any) -> list[Host]:
        return self.function(environ, timeout, **self.options, **options)

    @property
    def parameters(self) -> dict[str, tuple[inspect.Parameter, Any]]:
        """The options: name to parameter and type."""
        types = typing.get_type_hints(self.function)
        found = list(inspect.signature(self.function).parameters.items())[2:]
        return {name: (parameter, types.get(name, str)) for name, parameter in found}


def source(
    *, every: float = 5.0, variables: tuple[str, ...] = ("*",), if_empty: str = "", **helps: str
) -> Callable[[Callable[..., list[Host]]], Source]:
    """Make a function a source of hosts.

    The function gets the environment and the seconds that it may take. It returns the hosts that are named
    now, in any order, or raises a `DiscoveryError`. It is called in a separate process, which is killed if it
    hangs. The first line of its docstring describes the source to users. Its further parameters are arguments
    and options of ``hvdrecover discover SOURCE``: a parameter without a default is an argument, one with a
    default is an option, and one behind ``*`` without a default is an option that must be given. A parameter
    is a ``str``, an ``int``, a ``bool``, or, as the last argument, a ``tuple[str, ...]`` of all others.

    Args:
        every: least seconds between two calls.
        variables: environment variables on which the hosts depend; ``*`` for all.
        if_empty: a hint for users if the function returns no host.
        helps: the help text of each argument and option.

    Examples:
        >>> from hvdrecover.discovery import Host, source
        >>> @source(every=5.0, variables=(), number="number of the rack", gpus="GPUs of each machine")
        ... def rack(environ, timeout, number: int, gpus: int = 8):
        ...     'The machines of a rack, with a slot for each GPU.'
        ...     return [Host(f"rack{number}-{machine}", gpus) for machine in ("a", "b")]
        >>> rack({}, timeout=5.0, number=7)
        [Host(name='rack7-a', slots=8), Host(name='rack7-b', slots=8)]
    """
    return lambda function: Source(function, every, variables, if_empty, helps)


def find(name: str) -> Source:
    """Return a source; this package's own names take precedence over entry points."""
    if name in OURS:
        module, _, item = OURS[name].partition(":")
        found: Source = getattr(importlib.import_module(module), item)
        return found
    from importlib import metadata  # here, because it takes longer to import than the rest of a call

    points = metadata.entry_points(group=GROUP)
    if name not in points.names:
        names = ", ".join([*OURS, *sorted(points.names - OURS.keys())])
        raise ConfigError(f"host source '{name}'", f"is unknown (installed: {names})")
    point = points[name]
    package = f" of package {point.dist.name}" if point.dist else ""
    broken = f"entry point '{name} = {point.value}'{package}"
    try:
        loaded = point.load()
        made = loaded if isinstance(loaded, Source) else Source(loaded)
        inspect.signature(made.function)
    except Exception as error:  # the module may raise anything on import
        problem = f"{broken} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(f"host source '{name}'", problem) from error
    return made
