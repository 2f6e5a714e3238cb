"""Experiment trackers: the scalars of a whole job become one run, which outlives its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdrecover.errors import ConfigError

_AT_ONCE = 1000  # most metrics in one request to an MLflow server


@dataclass(frozen=True)
class Row:
    """The scalars of one step.

    Attributes:
        step: counted through the whole job.
        time: when they were measured, in seconds since the Unix epoch.
        values: the scalars by name.
    """

    step: int
    time: float
    values: Mapping[str, float]


class Tracker:
    """An experiment tracker. Derive from this class for one of your own: `open`, `log` and `close`.

    One process at a time calls these three, rank 0's, on a thread beside training. An exception is logged as
    a warning, and training continues without the tracker.

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
        _require("wandb", "WandB")
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
        """Log one row for each step."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)
        # W&B holds a step until the next one begins, so a killed process loses the last step.
        self._note(rows[-2].step if len(rows) > 1 else self._last)
        self._last = rows[-1].step

    def close(self, *, finished: bool) -> None:
        """Send the rows that wandb still holds."""
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
        _require("mlflow", "MLflow")
        self._experiment, self._name, self._params = experiment, run_name, dict(params or {})
        self._uri = tracking_uri

    def open(self, run: str) -> int:
        """Begin or continue the run."""
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
        """Log a metric for each scalar, and then how far that goes."""
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
        """Mark a run that has ended; one that may be continued still runs."""
        if finished:
            self._client.set_terminated(self._id)


def _require(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"tracker={name}()",
            f"the package {package} is not installed; pip install 'hvdrecover[{package}]'",
        )
