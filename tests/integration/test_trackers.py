"""Real experiment trackers are told of a job that loses rank 0, and then all of its processes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.integration.scripts.tracked import KILLED, STEPS, STOPPED
from tests.integration.wandb_files import records
from tests.support.jobs import ROOT_MAY_USE_MPI, Job, run_job, wait_until

pytestmark = pytest.mark.acceptance

SCRIPT = Path(__file__).with_name("scripts") / "tracked.py"
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),  # for the script's import of wandb_files
    "HVDRECOVER_NEAR": "off",  # else no step would have to be done again
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "WANDB_SILENT": "true",
    **ROOT_MAY_USE_MPI,
}


def steps_of_wandb(folder: Path) -> list[int]:
    """The steps in offline runs' files, in the order in which `wandb sync` would send them."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 3  # of as many processes of rank 0
    assert len({file.name for file in files}) == 1  # the run's id
    steps = []
    for file in files:
        for data in records(file.read_bytes()):
            items = {
                item.key or "/".join(item.nested_key): item for item in Record.FromString(data).history.item
            }
            if "number" in items:
                assert items["_step"].value_json == items["number"].value_json
                steps.append(int(items["_step"].value_json))
    return steps


def steps_of_mlflow(folder: Path) -> list[int]:
    """The steps of the only run, in the order in which they were logged."""
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    found = client.get_metric_history(run.info.run_id, "number")
    assert all(metric.value == metric.step for metric in found)
    return [metric.step for metric in found]


@LONG
@pytest.mark.parametrize("read", [steps_of_wandb, steps_of_mlflow])
def test_steps_are_logged_once_and_the_run_continues(
    read: Callable[[Path], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = read.__name__.removeprefix("steps_of_")
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed; pip install '.[{name}]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    command = [sys.executable, "-m", "hvdrecover", "run", "-np", "2", "--no-standby"]
    command += ["--", sys.executable, str(SCRIPT), str(tmp_path), name]
    environ = {**ENVIRON, "HVDRECOVER_EVENTS": str(tmp_path / "events")}

    job = Job(command, tmp_path / "log", environ)
    try:
        wait_until(job, (tmp_path / f"struck-{STOPPED}").exists)
    finally:
        job.kill()
    run_job(command, tmp_path / "log", environ)

    steps = Counter(map(int, (tmp_path / "steps").read_text().split()))
    assert [step for step, times in sorted(steps.items()) if times > 1] == [KILLED, *range(21, STOPPED + 1)]
    logged = read(tmp_path)
    # W&B holds the row of the last step until the next one, so one was lost with its process.
    lost = [KILLED - 1] if name == "wandb" else []
    assert logged == [step for step in range(1, STEPS + 1) if step not in lost]
