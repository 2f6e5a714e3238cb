"""Host sources by name. A new one is a class beside these and a line in `OURS`.

Others' are found by the entry point group ``hvdrecover.host_sources``: the name is what users type, the
object is the class.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
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
    "ray": "hvdrecover.discovery.sources.ray:Ray",
    "tf-config": "hvdrecover.discovery.sources.tf_config:TfConfig",
}
"""Name: module and class, of those that are here wherever hvdrecover is."""


def names() -> list[str]:
    """Names of all sources, ours first."""
    others = {point.name for point in _others()}
    return [*OURS, *sorted(others - OURS.keys())]


def find(name: str) -> type[Source]:
    """The class of a source.

    Raises:
        ConfigError: there is none of this name, or it can't be imported.
    """
    if name in OURS:
        module, _, item = OURS[name].partition(":")
        found: type[Source] = getattr(importlib.import_module(module), item)
        return found
    for point in _others():
        if point.name != name:
            continue
        try:
            other: type[Source] = point.load()
        except Exception as error:
            problem = f"its entry point {point.value} can't be loaded: {type(error).__name__}: {error}"
            raise ConfigError(f"host source '{name}'", problem) from error
        return other
    raise ConfigError(f"host source '{name}'", f"there is none of this name; there are {', '.join(names())}")


def _others() -> Iterator[EntryPoint]:
    from importlib import metadata  # only now, as it takes longer than all else that a call does

    yield from metadata.entry_points(group=GROUP)
