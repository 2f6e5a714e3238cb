"""The scalars of each rank's training, by step: loss, gradient norm, times.

Steps are counted through the whole job. A commit holds the count, so a job that goes back continues the axis
where the commit ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import Framework
from hvdrecover.state.hooks import Agreement, Context, Hook
from hvdrecover.state.horovod import paused
from hvdrecover.trackers import Feed, TensorBoard, Tracker

Number = Any
"""A number, or a tensor of one element that a device may still compute."""


class Scalars(Hook):
    """One rank's scalars.

    Args:
        folder: path or URL of the folder for the TensorBoard runs of all ranks; None writes none.
        context: the state's surroundings.
        tracker: the experiment tracker to which rank 0 reports; None reports to none.
    """

    key = "scalars"

    def __init__(self, folder: str | None, context: Context, tracker: Tracker | None = None) -> None:
        self.poll: Callable[[], None] = lambda: None  # asks the framework's side whether steps have ended
        self._context = context
        self._clock = context.clock
        # A rehearsal must not write into the runs of the job that it rehearses.
        if context.config.rehearsal:
            folder = tracker = None
        board = None if folder is None else Feed(TensorBoard(folder), context.clock, each_rank=True)
        self._tracked = None if tracker is None else Feed(tracker, context.clock)
        self._feeds = [each for each in (board, self._tracked) if each is not None]
        self._steps = 0
        self._commit_began = 0.0
        self._begin()
        if self._feeds:
            context.framework.report("times", self)

    def _begin(self) -> None:
        self._ended = self._clock.monotonic()  # the end of the last step
        self._stalled = 0.0  # seconds of commits since then
        self._waited = 0.0  # seconds of the coming step in which this rank waited for gradients of others
        self._waiting_since: float | None = None

    # -- called by the framework's side ----------------------------------------------------------------

    def waiting(self) -> None:
        """Note that this rank begins to wait for gradients of the others, unless it already waits."""
        if self._waiting_since is None:
            self._waiting_since = self._clock.monotonic()

    def arrived(self) -> None:
        """Note that the gradients of all ranks are there."""
        if self._waiting_since is not None:
            self.waited(self._clock.monotonic() - self._waiting_since)
            self._waiting_since = None

    def waited(self, seconds: float) -> None:
        """Add to the time of the coming step in which this rank waited for gradients of the others."""
        self._waited += seconds

    def stepped(self, values: Mapping[str, Number], steps: int = 1) -> None:
        """Count steps that have ended. ``values`` are scalars of the last one; times are means over all."""
        whole = self._clock.monotonic() - self._ended - self._stalled
        waited = self._waited
        self._begin()
        self._steps += steps
        self._add({**values, "seconds/step": whole / steps, "seconds/allreduce_wait": waited / steps})
        for feed in self._feeds:
            feed.keep_up()

    # -- an observer -----------------------------------------------------------------------------------

    def observed(self, values: Mapping[str, Number]) -> None:
        self.poll()  # the values belong to the step that has just ended
        self._add(values)

    def begins(self) -> None:
        self.poll()
        self._commit_began = self._clock.monotonic()

    def captured(self, snapshot: Snapshot) -> None:
        if self._tracked is not None:
            self._tracked.send(self._steps)

    def committed(self) -> None:
        stall = self._clock.monotonic() - self._commit_began
        self._stalled += stall
        self._add({"seconds/commit_stall": stall})

    def agreed(self, agreement: Agreement) -> None:
        self._begin()
        for feed in self._feeds:
            feed.begin(self._context.world.rank())

    def closing(self) -> None:
        self.poll()
        with paused():  # on all ranks: they wait for rank 0, which waits for its tracker
            for feed in self._feeds:
                feed.send(self._steps)
                feed.close(finished=True)

    def leaving(self) -> None:
        if self._tracked is not None:  # another process can continue its run; the exit closes the rest
            self._tracked.close()

    # -- a part of each commit -------------------------------------------------------------------------

    def capture(self) -> Json | None:
        """Return the count of steps, and the id of the tracker's run."""
        if not self._feeds:
            return None
        self.poll()
        return {"steps": self._steps, **({} if self._tracked is None else {"run": self._tracked.run})}

    def load(self, value: Json | None) -> None:
        self.poll()  # steps that have ended before must not count afterwards
        found: Any = value if isinstance(value, dict) else {}
        steps, run = found.get("steps", 0), found.get("run")
        if self._tracked is not None and isinstance(run, str):
            self._tracked.run = run
        if isinstance(steps, int) and steps != self._steps:
            self._steps = steps
            for feed in self._feeds:
                feed.go_to(steps)

    def resumed(self, value: Json | None) -> Json | None:
        """Give the run an id if the commit is of a job without a tracker."""
        if self._tracked is None or not isinstance(value, dict | None):
            return value
        return {"run": self._tracked.run, **(value or {})}

    def _add(self, values: Mapping[str, Number]) -> None:
        """Add scalars to the row of the last step."""
        for feed in self._feeds:
            feed.row(self._steps).update(values)


def as_numbers(framework: Framework, values: Mapping[str, Any]) -> dict[str, Number]:
    """Return copies of the values that a script reports, without waiting for a device; None is left out.

    Raises:
        ConfigError: a value is not a number.
    """
    found = {}
    for name, value in values.items():
        if value is None:
            continue
        shape = tuple(getattr(value, "shape", ()))
        if not hasattr(value, "__float__") or math.prod(shape) != 1:  # a tensor of a graph has no __float__
            kind = f"a {type(value).__name__}" + (f" of shape {shape}" if shape else "")
            raise ConfigError(f"log_metrics({name}=)", f"must be a number, got {kind}")
        number = value[(0,) * len(shape)] if shape else value
        found[name] = framework.clone(number) if isinstance(number, framework.tensors) else number
    return found
