"""Hosts, and the sources that name them: functions of this package, and entry points of others."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import signal
import subprocess
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdrecover.errors import ConfigError, DiscoveryError

GROUP = "hvdrecover.host_sources"  # of entry points; one is loaded only when a user names it
OURS = {
    "static": "hvdrecover.discovery.lists:static",
    "file": "hvdrecover.discovery.lists:file",
    "command": "hvdrecover.discovery.lists:command",
    "slurm": "hvdrecover.discovery.slurm:slurm",
    "kubernetes": "hvdrecover.discovery.kubernetes:kubernetes",
    "lsf": "hvdrecover.discovery.lists:lsf",
    "pbs": "hvdrecover.discovery.lists:pbs",
    "sge": "hvdrecover.discovery.lists:sge",
    "mpi": "hvdrecover.discovery.lists:mpi",
    "tf-config": "hvdrecover.discovery.lists:tf_config",
}
MOST_SLOTS = 4096  # maximum for one host; a larger number is a typing error
_KILLED = 5.0  # seconds for a killed program to end; one that waits for a disk may never do so
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Host:
    """A host that a source names.

    Attributes:
        name: as ssh takes it.
        slots: how many processes it takes; None if the source does not say.

    Examples:
        >>> from hvdrecover.discovery import Host
        >>> [Host("node1", slots=4), Host("node2")]
        [Host(name='node1', slots=4), Host(name='node2', slots=None)]
    """

    name: str
    slots: int | None = None


def check(name: str, slots: str | int | None = None) -> str:
    """Return the problem with a host and its number of slots, or an empty string."""
    if re.fullmatch(r"\[?[0-9A-Fa-f:.%]*:[A-Za-z0-9:.%\]]*", name):
        return f"'{name}' is an IPv6 address, which Horovod does not support; use the host's name"
    if re.fullmatch(r"[\w.-]+@[\w.-]+", name):
        return f"'{name}' contains a user; name the user in ssh's configuration"
    if not _NAME.fullmatch(name):
        return f"'{name}' is not a valid host name"
    if slots is None or (re.fullmatch("[0-9]{1,18}", str(slots)) and 1 <= int(slots) <= MOST_SLOTS):
        return ""
    return f"'{name}': slots must be an integer from 1 to {MOST_SLOTS}, got '{slots}'"


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


# -- for sources ----------------------------------------------------------------------------------------


def output_of(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> bytes:
    """Return the output of a program; after `timeout` seconds, it is killed with all its processes."""
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise DiscoveryError(name, f"cannot be started: {error.strerror}") from error
    try:
        printed, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise DiscoveryError(name, f"has not ended in {timeout:.2g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED)
    if process.returncode:
        # The last line with a letter: many programs end their errors with a rule or a frame.
        lines = [line.strip() for line in errors.decode(errors="replace").splitlines()]
        last = [line for line in lines if any(map(str.isalpha, line))][-1:]
        raise DiscoveryError(name, ": ".join([f"has ended with exit code {process.returncode}", *last]))
    return printed
