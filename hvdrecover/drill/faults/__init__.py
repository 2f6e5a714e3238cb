"""The faults of drills, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hvdrecover.drill.faults import clock, commits, data, discovery, hosts, near, processes, resize, storage
from hvdrecover.drill.faults.fault import Drilled, Fault, Switchable
from hvdrecover.errors import ConfigError

__all__ = ["FAULTS", "RESIZING", "Drilled", "Fault", "Switchable", "find"]

_ALL: tuple[Fault, ...] = (
    processes.Kill(),
    processes.KillFirst(),
    processes.KillAll(),
    processes.Stop(),
    processes.Loop(),
    processes.Segfault(),
    processes.OutOfMemory(),
    processes.Preemption(),
    processes.LauncherKilled(),
    processes.SlowRank(),
    storage.StorageAway(),
    storage.StorageSlow(),
    storage.StorageFlaky(),
    storage.DiskFull(),
    commits.CorruptCommit(),
    near.CorruptNear(),
    near.TmpfsFull(),
    discovery.DiscoveryFails(),
    discovery.DiscoveryHangs(),
    clock.ClockJump(),
    data.DataChanged(),
    hosts.HostCutOff(),
    hosts.HostPoweredOff(),
    resize.Resize(),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
RESIZING = ("resize", "kill", "resize", "kill-rank-0", "resize", "kill-all", "resize")
"""Those of a drill that changes the number of ranks."""


def find(names: Iterable[str]) -> list[Fault]:
    """The faults of these names, in their order.

    Raises:
        ConfigError: there is no fault of a name.
    """
    found = []
    for name in names:
        if name not in FAULTS:
            alike = difflib.get_close_matches(name, FAULTS, n=1, cutoff=0.0)[0]
            problem = f"there is no fault '{name}'; did you mean '{alike}'? There are {', '.join(FAULTS)}"
            raise ConfigError("--faults", problem)
        found.append(FAULTS[name])
    return found
