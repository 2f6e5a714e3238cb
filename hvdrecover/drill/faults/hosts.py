"""Faults of whole hosts, other than the one that the drill runs on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdrecover.drill.faults.fault import Drilled, Plain, Switchable


class _OfHosts(Plain):
    """A fault of a host that the drill can switch; which one has been is noted in the run's folder."""

    name: ClassVar[str]
    lasting: ClassVar[bool] = True

    def lacks(self, run: Drilled) -> str:
        """Whether there is such a host."""
        if run.hosts:
            return ""
        return (
            "a host other than this one that the drill can switch; start the drill from Python, and hand it "
            "such hosts (hvdrecover.drill.faults.fault.Switchable)"
        )

    def strike(self, run: Drilled, rank: int) -> None:
        """Strike a host; each rank's number, however many there are, leads to one."""
        host = run.hosts[rank % len(run.hosts)]
        self._note(run, host).touch()
        self._break(host)

    def end(self, run: Drilled) -> None:
        """Repair the hosts that were struck."""
        for host in run.hosts:
            if self._note(run, host).exists():
                self._repair(host)
                self._note(run, host).unlink()

    def _note(self, run: Drilled, host: Switchable) -> Path:
        return run.folder / f"{self.name}-{host.name}"

    def _break(self, host: Switchable) -> None:
        raise NotImplementedError

    def _repair(self, host: Switchable) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class HostCutOff(_OfHosts):
    """Nothing gets through to a host or from it, and no connection is closed.

    The ranks elsewhere notice within Horovod's network timeout, and ssh after some seconds; they go on
    without it. When it is back, the job takes it in again.
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
    summary: ClassVar[str] = "a host loses its power"

    def _break(self, host: Switchable) -> None:
        host.power_off()

    def _repair(self, host: Switchable) -> None:
        host.power_on()
