"""The scalars of each rank's training, by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.elastic.companions import Kept, Observer
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.scalars.log import Log
from hvdrecover.elastic.scalars.observed import Number
from hvdrecover.elastic.scalars.stragglers import shares
from hvdrecover.elastic.scalars.times import Times


class Scalars(Observer, Kept):
    """One rank's scalars.

    Steps are counted through the whole job: a commit holds the count, and the axis goes back with the job.

    Args:
        folder: path or URL of the folder for the runs of all ranks.
        context: the state's surroundings; parameters are measured at commits.

    Attributes:
        poll: called to find out whether steps have ended, before it matters.
        durable_age: returns the age of the last durable commit in seconds, on the rank that knows it.
    """

    key = "scalars"

    def __init__(self, folder: str, context: Context) -> None:
        self.poll: Callable[[], None] = lambda: None
        self.durable_age: Callable[[], float | None] = lambda: None
        self._context = context
        self._framework = context.framework
        self._contents = context.contents
        self._clock = context.clock
        self._log = Log(folder, context.framework.writer, context.clock)
        self._times = Times(context.clock)
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

    # -- an observer -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Have the framework report the parts of each step."""
        self._framework.report_times(self._contents, self)

    def observed(self, values: Mapping[str, Number]) -> None:
        """Take what the script reports of its step."""
        self.poll()
        (self._coming if self._times.under_way else self._log.row(self._steps)).update(values)

    def begins(self) -> None:
        """A commit begins."""
        self.poll()
        self._commit_began = self._clock.monotonic()

    def busy(self) -> int:
        """Return the microseconds of this rank's own work since the last time; 0 if unknown."""
        return round(self._times.take_busy() * 1e6)

    def compare(self, busy: Sequence[int]) -> None:
        """Take how long each rank has worked since the last commit."""
        self._shares = shares(busy)

    def committed(self) -> None:
        """A commit has ended."""
        row = self._log.row(self._steps)
        models = self._contents.components().values()
        row["norm/parameters"] = math.hypot(*map(self._framework.norm, models))
        stall = self._times.committed(self._commit_began)
        row["seconds/commit_stall"] = row.get("seconds/commit_stall", 0.0) + stall
        if (age := self.durable_age()) is not None:
            row["seconds/since_durable"] = age
        if self._shares is not None:
            row["straggler/share"] = self._shares[self._rank]
            row["straggler/slowest_rank"] = self._shares.index(1.0)

    def capture(self) -> Json | None:
        """Return the count of steps."""
        self.poll()
        return {"steps": self._steps}

    def load(self, value: Json | None) -> None:
        """Return to the count of a commit."""
        self.poll()  # what has ended before is not to be counted afterwards
        steps: Any = value.get("steps") if isinstance(value, dict) else 0
        if isinstance(steps, int) and steps != self._steps:
            self._steps = steps
            self._log.go_to(steps)

    def agreed(self, agreement: Agreement) -> None:
        """Training resumes at a commit."""
        self._rank = self._context.world.rank()
        self._coming = {}
        self._times.begin()
        self._log.begin(self._rank)

    def closing(self) -> None:
        """Training has ended, for now; write what there is."""
        self._log.close()
