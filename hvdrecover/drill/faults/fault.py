"""The interface of a drill's faults, and of what they may do to a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol


class Switchable(Protocol):
    """A host other than this one that a drill can cut off and switch off.

    Attributes:
        name: by which the run's hosts know it.
    """

    name: str

    def processes(self) -> list[int]:
        """Ids of the processes on it, among those of this host."""

    def cut_off(self) -> None:
        """Unplug its cable: no connection is closed, but nothing gets through."""

    def join(self) -> None:
        """Plug it in again."""

    def power_off(self) -> None:
        """End all that runs on it at once, without a word to others."""

    def power_on(self) -> None:
        """Switch it on; it can be logged in to when this returns."""


class Drilled(Protocol):
    """A run of the user's script under ``hvdrecover run``, to which a drill does things.

    Attributes:
        folder: the run's own folder; faults may keep files there.
        root: folder of its scratch checkpoint root.
        data: a copy of training data that may be changed, if the user has named one.
        size: how many ranks it is started with.
        hosts: its hosts that the drill can switch; none if it runs on this one alone.
        slots: the lines ``host:slots`` by which a program of the drill names all of its hosts.
        names_hosts: whether the user has said where it runs, or how that is found out.
        resizes: whether its number of ranks may change.
    """

    folder: Path
    root: Path
    data: Path | None
    size: int
    hosts: Sequence[Switchable]
    slots: Sequence[str]
    names_hosts: bool
    resizes: bool

    def ranks(self) -> list[int]:
        """The ranks that train now, in order."""

    def process_of(self, rank: int) -> int:
        """Process id of the training process that has a rank now."""

    def guardian_of(self, rank: int) -> int:
        """Process id of its guardian."""

    def supervisor(self) -> int:
        """Process id of the supervisor."""

    def launcher(self) -> int:
        """Process id of Horovod's driver."""

    def order(self, rank: int, what: str) -> None:
        """Have a training process do something at its next batch; see `hvdrecover.drill.witness`."""

    def repaired(self) -> None:
        """Say that a host has just been repaired."""

    def hosts_are_well(self) -> bool:
        """Return whether host discovery has found all hosts well since the last one was repaired."""

    def start_again(self) -> None:
        """Wait until the run has left, and start it again, as a scheduler would."""


class Fault(Protocol):
    """Something that may happen; a small frozen dataclass whose fields can be stored as JSON.

    Attributes:
        name: what users call it.
        summary: what it is, in a few words.
        lasting: whether `end` is to be called, some seconds after `strike`.
        may_stop: whether the run may rightly end with an error over it. It is then to be started again after
            `end`, and has to continue.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    lasting: ClassVar[bool]
    may_stop: ClassVar[bool]

    def whom(self, rank: int, size: int) -> str:
        """Whom it strikes, of so many ranks, if it is to strike one; empty if it strikes no one rank."""

    def lacks(self, run: Drilled) -> str:
        """Return what it needs and this machine or run lacks, with the remedy; empty if it may strike."""

    def ready(self, run: Drilled) -> bool:
        """Return whether it may strike now, as far as earlier faults are concerned."""

    def prepare(self, run: Drilled) -> dict[str, str]:
        """Before a run starts: the environment variables that it is to be started with."""

    def options(self, run: Drilled) -> list[str]:
        """After `prepare`: the options of ``hvdrecover run`` that the run is to be started with."""

    def strike(self, run: Drilled, rank: int) -> None:
        """Let it happen, to a rank if it is something that happens to one.

        Raises:
            DrillError: it can't happen to this run now.
        """

    def end(self, run: Drilled) -> None:
        """Let it be over; without effect if it is not under way."""

    def clean_up(self, run: Drilled) -> None:
        """After a run: take away what `prepare` has made outside of its folder."""


class Plain:
    """The common part of most faults: they need nothing, and are over at once."""

    lasting: ClassVar[bool] = False
    may_stop: ClassVar[bool] = False

    def whom(self, rank: int, size: int) -> str:
        """No one rank."""
        return ""

    def lacks(self, run: Drilled) -> str:
        """Nothing."""
        return ""

    def ready(self, run: Drilled) -> bool:
        """At any time."""
        return True

    def prepare(self, run: Drilled) -> dict[str, str]:
        """No environment variables."""
        return {}

    def options(self, run: Drilled) -> list[str]:
        """No options."""
        return []

    def end(self, run: Drilled) -> None:
        """Do nothing."""

    def clean_up(self, run: Drilled) -> None:
        """Do nothing."""


class OfOneRank(Plain):
    """A fault of the rank that the schedule says."""

    def whom(self, rank: int, size: int) -> str:
        """The rank."""
        return f"rank {rank % size}"
