"""Host sources by name.

A new source of this package is a module beside this one and a line in `OURS`. Other packages attach a source
by an entry point in the group ``hvdrecover.host_sources``. Its name is what users type, its object is the
class. It is loaded only when a user names it.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from hvdrecover.discovery.sources.interface import Source
from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "hvdrecover.host_sources"
OURS = {
    "static": "hvdrecover.discovery.sources.static:Static",
    "file": "hvdrecover.discovery.sources.file:File",
    "command": "hvdrecover.discovery.sources.command:Command",
    "slurm": "hvdrecover.discovery.sources.slurm:Slurm",
    "kubernetes": "hvdrecover.discovery.sources.kubernetes:Kubernetes",
    "mpi": "hvdrecover.discovery.sources.mpi:Mpi",
    "tf-config": "hvdrecover.discovery.sources.tf_config:TfConfig",
}
"""Name: module and class."""


def find(name: str) -> type[Source]:
    """Return the class of a source. Names of this package go before those of entry points.

    Raises:
        ConfigError: the name is unknown, or its entry point is broken.
    """
    if name in OURS:
        module, _, item = OURS[name].partition(":")
        found: type[Source] = getattr(importlib.import_module(module), item)
        return found
    installed = _installed()
    if name not in installed:
        names = ", ".join([*OURS, *sorted(installed.keys() - OURS.keys())])
        raise ConfigError(f"host source '{name}'", f"is unknown (installed: {names})")
    return _load(installed[name])


def _installed() -> dict[str, EntryPoint]:
    from importlib import metadata  # only now: it takes longer to import than all else that a call does

    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _load(point: EntryPoint) -> type[Source]:
    package = f" of package {point.dist.name}" if point.dist else ""
    broken = f"entry point '{point.name} = {point.value}'{package}"
    try:
        found: type[Source] = point.load()
    except Exception as error:  # whatever the module does on import
        problem = f"{broken} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(f"host source '{point.name}'", problem) from error
    if not dataclasses.is_dataclass(found) or not hasattr(found, "hosts"):
        problem = f"{broken} must be a dataclass with a method 'hosts'"
        raise ConfigError(f"host source '{point.name}'", problem)
    return found
