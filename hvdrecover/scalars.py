"""The scalars of each rank's training, by step: loss, gradient norm, times; and the trackers that get them.

1. A rank counts steps through the whole job. A commit holds the count, so a job that goes back continues the
   axis where the commit ends.
2. `Scalars` collects the scalars of each step in a row.
3. A `Feed` sends rows to a tracker, on a thread beside training. The scalars of rank 0 become one run in a
   tracker such as W&B, which outlives the job's processes. TensorBoard has a run for each rank.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import ConfigError
from hvdrecover.machine import Clock
from hvdrecover.state.adapter import Framework
from hvdrecover.state.hooks import Agreement, Context, Hook
from hvdrecover.state.horovod import paused

logger = logging.getLogger(__name__)

# Rows for TensorBoard wait so long, or until there are so many, so that no step waits for a device.
KEPT_SECONDS = 10.0
KEPT_STEPS = 1000
PATIENCE = 30.0  # seconds for a tracker to send everything; the other ranks may wait meanwhile
MOST_DUE = 10_000  # batches of rows that may wait for the tracker

_AT_ONCE = 1000  # most metrics in one request to an MLflow server

Number = Any
"""A number, or a tensor of one element that a device may still compute."""


# -- trackers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The scalars of one step."""

    step: int  # counted through the whole job
    time: float  # when they were measured, in seconds since the Unix epoch
    values: Mapping[str, float]  # by name


class Tracker:
    """An experiment tracker. Derive from this class for one of your own: `open`, `log` and `close`.

    Rank 0 calls these three, on a thread beside training. An exception is logged as a warning, and training
    continues without the tracker.

    Examples:
        >>> class Lines(recover.Tracker):
        ...     def open(self, run):
        ...         self._file = open(f"{run}.txt", "a")
        ...         return 0  # after each start, repeated steps are logged again
        ...     def log(self, rows):
        ...         for row in rows:
        ...             print(row.step, row.values, file=self._file)
        ...     def close(self, *, finished):
        ...         self._file.close()
    """

    def open(self, run: str) -> int:
        """Start a run or continue it.

        Args:
            run: its id. The job's commits hold it.

        Returns:
            The last step that the run has, or 0. Only later steps are logged.
        """
        raise NotImplementedError

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows in the order of their steps."""
        raise NotImplementedError

    def close(self, *, finished: bool) -> None:
        """Send everything that was logged.

        Args:
            finished: whether the run has ended. If not, another process may continue it.
        """
        raise NotImplementedError


class WandB(Tracker):
    """Weights & Biases, online or offline.

    An offline run has one folder for each process; ``wandb sync`` joins the folders of one id to one run.

    Args:
        options: arguments of ``wandb.init``, such as ``project`` and ``config``, or the ``id`` of a run.

    Raises:
        ConfigError: the package is missing.

    Examples:
        >>> tracker = recover.WandB(project="digits", config={"lr": 0.1})  # doctest: +SKIP
        >>> state = recover.TorchState(model, optimizer, tracker=tracker)  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        _require("wandb", "tracker=WandB()")
        self._options = options

    def open(self, run: str) -> int:
        """Start or continue the run."""
        import wandb

        # W&B writes to its file every 15 s by default. A killed process loses rows that are not written.
        soon = {"x_transaction_log_flush_interval": 1.0}
        options = {"id": run, "resume": "allow", "settings": soon, **self._options}
        self._run = wandb.init(**options)
        # An offline run does not know the steps of earlier processes; this file beside their folders does.
        self._written = Path(self._run.dir).parents[1] / f"hvdrecover-{self._run.id}.step"
        if self._run.resumed:
            self._last = int(self._run.starting_step) - 1
        else:
            self._last = int(self._written.read_text()) if self._written.exists() else 0
        return self._last

    def log(self, rows: Sequence[Row]) -> None:
        """Log the rows."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)
        # W&B holds a step until the next one begins, so a killed process loses the last step.
        self._note(rows[-2].step if len(rows) > 1 else self._last)
        self._last = rows[-1].step

    def close(self, *, finished: bool) -> None:
        """Send everything; see `Tracker.close`."""
        self._run.finish()
        self._note(self._last)

    def _note(self, step: int) -> None:
        fresh = self._written.with_suffix(".new")
        fresh.write_text(str(step))
        fresh.replace(self._written)  # whole, also if this process is killed


class MLflow(Tracker):
    """MLflow.

    Args:
        experiment: the experiment's name; it is made if there is none.
        run_name: the run's name.
        params: parameters of a new run.
        tracking_uri: the server or store; None takes ``MLFLOW_TRACKING_URI``.

    Raises:
        ConfigError: the package is missing.

    Examples:
        >>> tracker = recover.MLflow("digits", params={"lr": 0.1})  # doctest: +SKIP
        >>> state = recover.TorchState(model, optimizer, tracker=tracker)  # doctest: +SKIP
    """

    _RUN, _STEP = "hvdrecover.run", "hvdrecover.step"  # tags: MLflow itself chooses the ids of runs

    def __init__(
        self,
        experiment: str = "Default",
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        _require("mlflow", "tracker=MLflow()")
        self._experiment, self._name, self._params = experiment, run_name, dict(params or {})
        self._uri = tracking_uri

    def open(self, run: str) -> int:
        """Start or continue the run."""
        from mlflow import MlflowClient

        self._client = client = MlflowClient(self._uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
        found = client.search_runs([experiment], f"tags.`{self._RUN}` = '{run}'", max_results=1)
        if found:
            self._id: str = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return int(found[0].data.tags.get(self._STEP, 0))
        self._id = client.create_run(experiment, tags={self._RUN: run}, run_name=self._name).info.run_id
        for name, value in self._params.items():
            client.log_param(self._id, name, value)
        return 0

    def log(self, rows: Sequence[Row]) -> None:
        """Log the rows."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for begin in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._id, metrics[begin : begin + _AT_ONCE])
        self._client.set_tag(self._id, self._STEP, str(rows[-1].step))

    def close(self, *, finished: bool) -> None:
        """Send everything; see `Tracker.close`."""
        if finished:
            self._client.set_terminated(self._id)


def _require(package: str, setting: str) -> None:
    if find_spec(package) is None:
        problem = f"the package {package} is not installed; pip install 'hvdrecover[{package}]'"
        raise ConfigError(setting, problem)


class TensorBoard(Tracker):
    """TensorBoard: each start writes another file to its rank's folder below a folder or URL."""

    def __init__(self, folder: str) -> None:
        _require("tensorboard", "tensorboard")
        from tensorboard.compat import tf
        from tensorboard.summary.writer import event_file_writer  # noqa: F401

        tf.io.gfile  # noqa: B018  imports TensorFlow if it is installed: now, and not amid the first steps
        self._folder = folder.rstrip("/")

    def open(self, run: str) -> int:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._file = EventFileWriter(f"{self._folder}/{run}")
        self._is_new = True
        return 0

    def log(self, rows: Sequence[Row]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._is_new:
            # Earlier files may have this step and later ones, now repeated. TensorBoard drops them there.
            self._is_new, start = False, SessionLog(status=SessionLog.START)
            self._file.add_event(Event(wall_time=rows[0].time, step=rows[0].step, session_log=start))
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._file.add_event(Event(wall_time=row.time, step=row.step, summary=Summary(value=values)))
        self._file.flush()

    def close(self, *, finished: bool) -> None:
        self._file.close()


# -- the way to a tracker ------------------------------------------------------------------------------


class Feed:
    """Sends rows to a tracker by a thread, so a tracker that hangs delays no step."""

    def __init__(self, tracker: Tracker, clock: Clock, *, each_rank: bool = False) -> None:
        self.run = uuid.uuid4().hex[:16]
        self._tracker, self._clock, self._each_rank = tracker, clock, each_rank
        self._rows: dict[int, tuple[float, dict[str, Any]]] = {}  # in the order of their steps
        self._reports = self._finished = False
        self._due: queue.SimpleQueue[Sequence[Row] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        atexit.register(self.close)

    def row(self, step: int) -> dict[str, Any]:
        """Return the scalars of a step, to be added to: numbers, or tensors that a device still computes."""
        _, values = self._rows.setdefault(step, (self._clock.now(), {}))
        return values

    def begin(self, rank: int) -> None:
        """Report as this rank from now on; a rank without a run leaves it to another process."""
        run = f"rank-{rank}" if self._each_rank else self.run
        reports = self._each_rank or rank == 0
        if run != self.run or not reports:
            self.close()
        self.run, self._reports = run, reports

    def go_to(self, step: int) -> None:
        """Resume from a step: drop later ones, which come again."""
        self._rows = {number: row for number, row in self._rows.items() if number <= step}
        if self._each_rank:
            self.close()  # the next file takes back later steps of this one

    def keep_up(self) -> None:
        """Send the rows that are due for TensorBoard."""
        # TensorBoard can drop repeated steps. A tracker with one run gets a row once a commit holds its step.
        if self._each_rank and self._rows:
            oldest, _ = next(iter(self._rows.values()))
            if len(self._rows) >= KEPT_STEPS or self._clock.now() - oldest >= KEPT_SECONDS:
                self.send(max(self._rows))

    def send(self, last: int) -> None:
        """Send the rows up to a step."""
        rows = [Row(step, *row) for step, row in self._rows.items() if step <= last]
        self._rows = {step: row for step, row in self._rows.items() if step > last}
        if not rows or not self._reports:
            return
        if self._thread is None:
            self._due = queue.SimpleQueue()  # None ends the thread
            # If it hangs, `close` gives it up, and the next thread has another queue.
            self._thread = threading.Thread(target=self._log, args=(self._due, self.run), daemon=True)
            self._thread.start()
        if not self._thread.is_alive():
            return  # the tracker has failed, and a warning has said so
        if self._due.qsize() < MOST_DUE:
            self._due.put(rows)
        else:
            self._reports = False
            self._warn("no more scalars are logged: it does not keep up")

    def close(self, *, finished: bool = False) -> None:
        """Send the rest and wait for the tracker. Later rows go to the same run."""
        if self._each_rank:
            self.send(max(self._rows, default=0))
        if self._thread is not None:
            self._finished = finished
            self._due.put(None)
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self._warn(f"it has not answered for {PATIENCE:.0f} s, and is left")
            self._thread = None

    def _log(self, due: queue.SimpleQueue[Sequence[Row] | None], run: str) -> None:
        try:
            known = sent = self._tracker.open(run)
            while (rows := due.get()) is not None:
                # Values that the script reports of a step after its commit come as a second row of the step.
                fresh = [
                    # This waits for numbers that a device still computes.
                    Row(row.step, row.time, {name: float(value) for name, value in row.values.items()})
                    for row in rows
                    if row.step > known and row.step >= sent
                ]
                if fresh:
                    self._tracker.log(fresh)
                    sent = fresh[-1].step
            self._tracker.close(finished=self._finished)
        except Exception as error:  # trackers raise errors of many classes
            self._warn(f"no more scalars are logged: {type(error).__name__}: {error}")

    def _warn(self, problem: str) -> None:
        logger.warning("%s: %s", type(self._tracker).__name__, problem)


# -- the scalars of a rank -----------------------------------------------------------------------------


class Scalars(Hook):
    """One rank's scalars: for TensorBoard's run of this rank in a folder, and on rank 0 for a tracker."""

    key = "scalars"

    def __init__(self, folder: str | None, context: Context, tracker: Tracker | None = None) -> None:
        self.poll: Callable[[], None] = lambda: None  # asks the framework's side whether steps have ended
        self._context = context
        self._clock = context.clock
        if context.config.drill is not None:  # it must not write into the runs of the user's job
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

    def waiting(self) -> None:
        """Note that this rank waits for gradients of the others from now on."""
        if self._waiting_since is None:
            self._waiting_since = self._clock.monotonic()

    def arrived(self) -> None:
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

    def capture(self) -> Json | None:
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
        for feed in self._feeds:
            feed.row(self._steps).update(values)


def as_numbers(framework: Framework, values: Mapping[str, Any]) -> dict[str, Number]:
    """Return copies of the numbers that a script reports, without waiting for a device; None is left out."""
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
