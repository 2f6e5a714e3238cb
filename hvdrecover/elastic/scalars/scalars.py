"""What is told of each rank's training, and of which step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdrecover.checkpoint.values import Json
from hvdrecover.clock import Clock
from hvdrecover.elastic.contents import Contents
from hvdrecover.elastic.interfaces import Framework
from hvdrecover.elastic.scalars.log import Log
from hvdrecover.elastic.scalars.observed import Number
from hvdrecover.elastic.scalars.stragglers import shares
from hvdrecover.elastic.scalars.times import Times


class Scalars:
    """One rank's scalars.

    Steps are counted through the whole job: a commit holds the count, and the axis goes back with the job.

    Args:
        folder: path or URL of the folder for the runs of all ranks.
        framework: opens writers.
        contents: whose parameters are measured at commits.
        clock: where times come from.

    Attributes:
        poll: called to find out whether steps have ended, before it matters.
    """

    def __init__(self, folder: str, framework: Framework, contents: Contents, clock: Clock) -> None:
        self.poll: Callable[[], None] = lambda: None
        self._framework = framework
        self._contents = contents
        self._clock = clock
        self._log = Log(folder, framework.writer, clock)
        self._times = Times(clock)
        self._steps = 0
        self._coming: dict[str, Number] = {}
        self._rank = 0
        self._shares: list[float] | None = None
        self._commit_began = 0.0

    # -- told by the framework's side ------------------------------------------------------------------

    def fetched(self) -> None:
        """The batch of a step is there."""
        self._times.fetched()

    def waiting(self) -> None:
        """This rank begins to wait for gradients of the others."""
        self._times.waiting()

    def met(self) -> None:
        """The gradients of all are there."""
        self._times.met()

    def waited(self, seconds: float) -> None:
        """A graph, which sets no marks, has waited for gradients of the others for so long."""
        self._times.waited(seconds)

    def waited_for_data(self, seconds: float) -> None:
        """A graph, which sets no marks, has waited for its batch for so long."""
        self._times.waited_for_data(seconds)

    def measured(self, values: Mapping[str, Number]) -> None:
        """Scalars of the step that is under way."""
        self._coming.update(values)

    def stepped(self, steps: int = 1) -> None:
        """So many steps have ended; what was measured is of the last of them."""
        self._steps += steps
        took = self._times.stepped(steps)
        waits = {"seconds/data_wait": took.data_wait, "seconds/allreduce_wait": took.allreduce_wait}
        row = self._log.row(self._steps)
        row.update(self._coming)
        row["seconds/step"] = took.whole
        row.update({name: seconds for name, seconds in waits.items() if seconds is not None})
        self._coming = {}
        self._log.keep_up()

    # -- told by the state -----------------------------------------------------------------------------

    def observe(self, values: Mapping[str, Number]) -> None:
        """What the script tells of its step."""
        self.poll()
        (self._coming if self._times.under_way else self._log.row(self._steps)).update(values)

    def committing(self) -> None:
        """A commit begins."""
        self.poll()
        self._commit_began = self._clock.monotonic()

    def busy(self) -> int:
        """Microseconds of this rank's own work since the last time; 0 if unknown."""
        return round(self._times.take_busy() * 1e6)

    def compare(self, busy: Sequence[int]) -> None:
        """How long each rank has worked since the last commit."""
        self._shares = shares(busy)

    def committed(self, age: float | None) -> None:
        """A commit has ended.

        Args:
            age: of the last durable commit in seconds, on the rank that knows it.
        """
        row = self._log.row(self._steps)
        models = self._contents.components().values()
        row["norm/parameters"] = math.hypot(*map(self._framework.norm, models))
        stall = self._times.committed(self._commit_began)
        row["seconds/commit_stall"] = row.get("seconds/commit_stall", 0.0) + stall
        if age is not None:
            row["seconds/since_durable"] = age
        if self._shares is not None:
            row["straggler/share"] = self._shares[self._rank]
            row["straggler/slowest_rank"] = self._shares.index(1.0)

    def state(self) -> dict[str, Json]:
        """What a commit holds of this."""
        self.poll()
        return {"scalars": {"steps": self._steps}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to where a commit was made."""
        self.poll()  # what has ended before is not to be counted afterwards
        held = state.get("scalars")
        steps = held.get("steps") if isinstance(held, dict) else 0
        if isinstance(steps, int) and steps != self._steps:
            self._steps = steps
            self._log.go_to(steps)

    def begin(self, rank: int) -> None:
        """The ranks have met, and training goes on from a commit."""
        self._rank = rank
        self._coming = {}
        self._times.begin()
        self._log.begin(rank)

    def close(self) -> None:
        """Training has ended, for now; write what there is."""
        self._log.close()


class NoScalars:
    """What a state tells when nobody wants to look: it goes nowhere."""

    def observe(self, values: Mapping[str, Number]) -> None:
        """As `Scalars.observe`."""

    def committing(self) -> None:
        """As `Scalars.committing`."""

    def busy(self) -> int:
        """Unknown."""
        return 0

    def compare(self, busy: Sequence[int]) -> None:
        """As `Scalars.compare`."""

    def committed(self, age: float | None) -> None:
        """As `Scalars.committed`."""

    def state(self) -> dict[str, Json]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """As `Scalars.load`."""

    def begin(self, rank: int) -> None:
        """As `Scalars.begin`."""

    def close(self) -> None:
        """As `Scalars.close`."""
