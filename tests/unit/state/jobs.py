"""The pieces of which the tests of the elastic core build their jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hvdrecover.checkpoint import Checkpoint
from hvdrecover.config import Config
from hvdrecover.state.hooks import Hook
from hvdrecover.state.state import State
from hvdrecover.virtual.ranks import VirtualRanks
from tests.fakes.clock import SharedClock
from tests.fakes.framework import FakeFramework
from tests.fakes.world import FakeJob, FakeWorld, Fault

URL = "fake://root"

CONFIG = Config(elastic=True, launched=True, host="host")
STATIC = dataclasses.replace(CONFIG, elastic=False)


class Process:
    """The things that one process of a job has."""

    def __init__(self, world: FakeWorld, *, seed: int = 1) -> None:
        self.world = world
        self.framework = FakeFramework(seed)
        self.generator = self.framework.generator
        self.clock = SharedClock()
        self.config = CONFIG
        self.states: list[State] = []

    def state(
        self,
        checkpoint: Checkpoint | str | None = None,
        *,
        config: Config | None = None,
        hooks: Sequence[Hook] = (),
        virtual: VirtualRanks | None = None,
        **attributes: Any,
    ) -> State:
        state = State(
            self.framework,
            self.world,
            checkpoint=checkpoint,
            config=config or self.config,
            clock=self.clock,
            hooks=hooks,
            virtual=virtual,
            attributes=attributes,
        )
        self.world.told.append(state.on_hosts_updated)
        self.states.append(state)
        return state

    def end(self) -> None:
        """End the threads that may be left."""
        for state in self.states:
            state._session.durable.retire()


def initialised(body: Callable[[Process], Any], *, seed: int = 1) -> Callable[[FakeWorld], Any]:
    """A script: initialise, then the body."""

    def main(world: FakeWorld) -> Any:
        world.init()
        return body(Process(world, seed=seed))

    return main


def on_ranks(size: int, body: Callable[[Process], Any], faults: Sequence[Fault] = ()) -> list[Any]:
    """Run a body on all ranks of a job to its end; return what the ranks returned, by rank."""
    return FakeJob(initialised(body), size, faults).results()
