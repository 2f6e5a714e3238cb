"""Host sources by name. A new one is a class beside these and a line in `_OURS`.

Others' are found by the entry point group ``hvdrecover.host_sources``: the name is what users type, the
object is the class.
"""

from __future__ import annotations

import importlib
from importlib import metadata

from hvdrecover.discovery.sources.interface import Source
from hvdrecover.errors import ConfigError

GROUP = "hvdrecover.host_sources"
_OURS = {
    "static": "hvdrecover.discovery.sources.static:Static",
    "file": "hvdrecover.discovery.sources.file:File",
    "command": "hvdrecover.discovery.sources.command:Command",
    "slurm": "hvdrecover.discovery.sources.slurm:Slurm",
    "kubernetes": "hvdrecover.discovery.sources.kubernetes:Kubernetes",
    "mpi": "hvdrecover.discovery.sources.mpi:Mpi",
    "tf-config": "hvdrecover.discovery.sources.tf_config:TfConfig",
}


def names() -> list[str]:
    """Names of all sources, ours first."""
    others = sorted({point.name for point in metadata.entry_points(group=GROUP)})
    return [*_OURS, *(name for name in others if name not in _OURS)]


def find(name: str) -> type[Source]:
    """The class of a source.

    Raises:
        ConfigError: there is none of this name, or it can't be imported.
    """
    if name in _OURS:
        module, _, item = _OURS[name].partition(":")
        found: type[Source] = getattr(importlib.import_module(module), item)
        return found
    for point in metadata.entry_points(group=GROUP, name=name):
        try:
            other: type[Source] = point.load()
        except Exception as error:
            problem = f"its entry point {point.value} can't be loaded: {type(error).__name__}: {error}"
            raise ConfigError(f"host source '{name}'", problem) from error
        return other
    raise ConfigError(f"host source '{name}'", f"there is none of this name; there are {', '.join(names())}")
