"""The surroundings of one rank's state: what all of its parts are given."""

from __future__ import annotations

from dataclasses import dataclass

from hvdrecover.clock import Clock
from hvdrecover.config import Config
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.interfaces import Framework, World
from hvdrecover.events import Events


class Place:
    """This rank's place in the job. Until it has agreed on a state with the others, it counts as alone.

    Args:
        world: the ranks.

    Attributes:
        job: identity of the job; empty before the first agreement.
    """

    def __init__(self, world: World) -> None:
        self._world = world
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
    """

    framework: Framework
    world: World
    contents: Contents
    config: Config
    events: Events
    clock: Clock
    place: Place
