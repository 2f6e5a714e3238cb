"""The scalars of each rank's training, by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.elastic.companions import Kept, Observer
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.lifecycle import stalls
from hvdrecover.elastic.scalars.log import Log
from hvdrecover.elastic.scalars.observed import Number
from hvdrecover.elastic.scalars.stragglers import shares
from hvdrecover.elastic.scalars.times import Times
from hvdrecover.elastic.scalars.tracked import Tracked
from hvdrecover.elastic.scalars.trackers import Tracker


class Scalars(Observer, Kept):
    """One rank's scalars.

    Steps are counted through the whole job: a commit holds the count, and the axis goes back with the job.

    Args:
        folder: path or URL of the folder for the runs of all ranks; None writes none.
        context: the state's surroundings; parameters are measured at commits.
        tracker: the experiment tracker to which rank 0 reports; None reports to none.

    Attributes:
        poll: called to find out whether steps have ended, before it matters.
        durable_age: returns the age of the last durable commit in seconds, on the rank that knows it.
    """

    key = "scalars"

    def __init__(self, folder: str | None, context: Context, tracker: Tracker | None = None) -> None:
        self.poll: Callable[[], None] = lambda: None
        self.durable_age: Callable[[], float | None] = lambda: None
        self._context = context
        self._framework = context.framework
        self._contents = context.contents
        self._clock = context.clock
        log = None if folder is None else Log(folder, context.framework.writer, context.clock)
        self._tracked = None if tracker is None else Tracked(tracker, context.clock)
        self._logs: list[Log | Tracked] = [each for each in (log, self._tracked) if each is not None]
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

    def arrived(self) -> None:
        """The gradients of all are there."""
        self._times.arrived()

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
        self._add({**self._coming, "seconds/step": took.whole})
        self._add({name: seconds for name, seconds in waits.items() if seconds is not None})
        self._coming = {}
        for log in self._logs:
            log.keep_up()

    # -- an observer -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Have the framework report the parts of each step."""
        self._framework.report_times(self._contents, self)

    def observed(self, values: Mapping[str, Number]) -> None:
        """Take what the script reports of its step."""
        self.poll()
        if self._times.under_way:
            self._coming.update(values)
        else:
            self._add(values)

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

    def captured(self, snapshot: Snapshot) -> None:
        """A commit holds the steps up to here."""
        if self._tracked is not None:
            self._tracked.captured(self._steps)

    def committed(self) -> None:
        """A commit has ended."""
        trained = map(self._framework.trained, self._contents.components().values())
        self._add({"norm/parameters": math.hypot(*map(self._framework.norm, trained))})
        stall = self._times.committed(self._commit_began)
        for log in self._logs:
            row = log.row(self._steps)
            row["seconds/commit_stall"] = row.get("seconds/commit_stall", 0.0) + stall
        if (age := self.durable_age()) is not None:
            self._add({"seconds/since_durable": age})
        if self._shares is not None:
            share, slowest = self._shares[self._rank], self._shares.index(1.0)
            self._add({"straggler/share": share, "straggler/slowest_rank": slowest})
        if self._tracked is not None:
            self._tracked.keep_up()

    def capture(self) -> Json | None:
        """Return the count of steps, and the id of the tracker's run."""
        self.poll()
        return {"steps": self._steps, **({} if self._tracked is None else {"run": self._tracked.run})}

    def load(self, value: Json | None) -> None:
        """Return to the count of a commit."""
        self.poll()  # what has ended before is not to be counted afterwards
        found: Any = value if isinstance(value, dict) else {}
        steps, run = found.get("steps", 0), found.get("run")
        if self._tracked is not None and isinstance(run, str):
            self._tracked.run = run
        if isinstance(steps, int) and steps != self._steps:
            self._steps = steps
            for log in self._logs:
                log.go_to(steps)

    def resumed(self, value: Json | None) -> Json | None:
        """Give the run an id, if the commit is of a job that had no tracker."""
        if self._tracked is None or not isinstance(value, dict | None):
            return value
        return {"run": self._tracked.run, **(value or {})}

    def agreed(self, agreement: Agreement) -> None:
        """Training resumes at a commit."""
        self._rank = self._context.world.rank()
        self._coming = {}
        self._times.begin()
        for log in self._logs:
            log.begin(self._rank)

    def closing(self) -> None:
        """Training has ended, for now; write what there is."""
        if self._tracked is not None:
            self._tracked.finish()
        with stalls.paused():  # on all ranks: the others wait for rank 0, and that for a tracker
            for log in self._logs:
                log.close()

    def leaving(self) -> None:
        """Let another process continue the tracker's run; all else is closed at the exit."""
        if self._tracked is not None:
            self._tracked.close()

    def _add(self, values: Mapping[str, Number]) -> None:
        """Add scalars to the rows of the last step."""
        for log in self._logs:
            log.row(self._steps).update(values)
