"""The surroundings of one rank's state: what all of its parts are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdrecover.clock import Clock
from hvdrecover.config import Config
from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.interfaces import Framework, World
from hvdrecover.errors import ConfigError
from hvdrecover.events import Events

if TYPE_CHECKING:
    from hvdrecover.elastic.virtual.ranks import VirtualRanks


class Place:
    """This rank's place in the job. Until it has agreed on a state with the others, it counts as alone.

    Args:
        world: the ranks.
        virtual: the virtual ranks; None if the job has none.

    Attributes:
        job: identity of the job; empty before the first agreement.
    """

    def __init__(self, world: World, virtual: VirtualRanks | None = None) -> None:
        self._world = world
        self._virtual = virtual
        self.job = ""

    @property
    def joined(self) -> bool:
        """Return whether this rank has agreed on a state with the others."""
        return self.job != ""

    @property
    def rank(self) -> int:
        """This rank; 0 while it is alone."""
        return self._world.rank() if self.joined else 0

    @property
    def size(self) -> int:
        """The number of ranks; 1 while this one is alone."""
        return self._world.size() if self.joined else 1

    @property
    def carried(self) -> Carried:
        """The ranks whose own states this process has: itself, or its virtual ranks."""
        return Carried((self.rank,), self.size) if self._virtual is None else self._virtual.carried

    @property
    def among_all(self) -> Carried:
        """The same once this rank has agreed with the others."""
        alone = self._virtual is None
        return Carried((self._world.rank(),), self._world.size()) if alone else self.carried

    @property
    def stream(self) -> int:
        """The rank whose random streams this process has; all have one outside of a virtual rank's part."""
        return self.rank if self._virtual is None else self._virtual.size


@dataclass(frozen=True)
class Context:
    """The surroundings.

    Attributes:
        framework: the adapter's facts about its framework.
        world: the ranks.
        contents: the state's attributes.
        config: the process's settings.
        events: of this process.
        clock: where times come from.
        place: this rank's place in the job.
        virtual: the virtual ranks; None if the job has none.
    """

    framework: Framework
    world: World
    contents: Contents
    config: Config
    events: Events
    clock: Clock
    place: Place
    virtual: VirtualRanks | None = None

    def virtual_ranks(self) -> VirtualRanks:
        """Return the virtual ranks.

        Raises:
            ConfigError: the job has none.
        """
        if self.virtual is None:
            raise ConfigError("state.steps()", "the state has no virtual ranks; make it with virtual_ranks=")
        return self.virtual
