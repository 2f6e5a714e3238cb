"""Faults of whole hosts, other than the one that the drill runs on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdrecover.drill.faults.fault import Drilled, Plain, Switchable
from hvdrecover.errors import DrillError


class _OfHosts(Plain):
    """A fault of a host that the drill can switch, and on which a rank is.

    Which one was struck is noted in the run's folder.
    """

    name: ClassVar[str]
    lasting: ClassVar[bool] = True

    def lacks(self, run: Drilled) -> str:
        """Return whether there is such a host."""
        if run.size < 2:
            return "a rank on another host than the first; start the drill with -np 2 --lab 3"
        if not run.hosts:
            return f"hosts that a drill can switch; --lab {run.size + 1} makes them on this machine, for root"
        return ""

    def whom(self, rank: int, size: int) -> str:
        """The host of a rank other than 0, which is on the first host."""
        return f"the host of rank {1 + rank % (size - 1)}" if size > 1 else ""

    def ready(self, run: Drilled) -> bool:
        """With all hosts, so that there is a spare one."""
        return run.hosts_are_well()

    def strike(self, run: Drilled, rank: int) -> None:
        """Strike a host that a rank is on; each rank's number, however many there are, leads to one.

        Raises:
            DrillError: all ranks are on hosts that can't be switched.
        """
        pids = [run.process_of(each) for each in run.ranks()]
        of_ranks = {pid: host for host in run.hosts for pid in host.processes()}
        used = [of_ranks[pid] for pid in pids if pid in of_ranks]
        if not used:
            raise DrillError(os.fspath(run.folder), f"no rank is on a host that '{self.name}' can strike")
        host = used[rank % len(used)]
        self._note(run, host).touch()
        self._break(host)

    def end(self, run: Drilled) -> None:
        """Repair the hosts that were struck."""
        for host in run.hosts:
            if self._note(run, host).exists():
                self._repair(host)
                self._note(run, host).unlink()
                run.repaired()

    def _note(self, run: Drilled, host: Switchable) -> Path:
        return run.folder / f"{self.name}-{host.name}"

    def _break(self, host: Switchable) -> None:
        raise NotImplementedError

    def _repair(self, host: Switchable) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class HostCutOff(_OfHosts):
    """Nothing gets through to a host or from it, and no connection is closed.

    The ranks elsewhere notice within Horovod's network timeout, and ssh after some seconds; they continue
    with a spare host instead, or without it. When it is back, the job takes it in again.
    """

    name: ClassVar[str] = "host-cut-off"
    summary: ClassVar[str] = "a host is cut off from the network"

    def _break(self, host: Switchable) -> None:
        host.cut_off()

    def _repair(self, host: Switchable) -> None:
        host.join()


@dataclass(frozen=True)
class HostPoweredOff(_OfHosts):
    """All that runs on a host ends at once, without a word to the others; as `HostCutOff`."""

    name: ClassVar[str] = "host-powered-off"
    summary: ClassVar[str] = "a host is powered off"

    def _break(self, host: Switchable) -> None:
        host.power_off()

    def _repair(self, host: Switchable) -> None:
        host.power_on()
