"""Real experiment trackers are told of a job that loses rank 0, and then all of its processes."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdrecover.examples.digits_run import PATIENCE, ROOT_MAY_USE_MPI
from hvdrecover.launch.job import Job
from tests.integration.conftest import LONG
from tests.integration.scripts.tracked import DURABLE_EVERY, KILLED, STEPS

SCRIPT = Path(__file__).with_name("scripts") / "tracked.py"
STOPPED = 26  # about when all processes are killed, after a durable commit at step 20
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "HVDRECOVER_NEAR": "off",  # else no step would have to be done again
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "WANDB_SILENT": "true",
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.1",  # what it has not written, wandb loses when it is killed
    **ROOT_MAY_USE_MPI,
}
_BLOCK, _MAGIC = 32768, b":W&B"  # of wandb's files
_FULL, _LAST = 1, 4  # kinds of records: all in one piece, and the last of several pieces


def steps_of_wandb(folder: Path) -> list[int]:
    """The steps in offline runs' files, in the order in which `wandb sync` would send them."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 3  # of as many processes of rank 0
    assert len({file.name for file in files}) == 1  # the run's id
    steps = []
    for file in files:
        for data in records_of_wandb(file.read_bytes()):
            items = {
                item.key or "/".join(item.nested_key): item for item in Record.FromString(data).history.item
            }
            if "number" in items:
                assert items["_step"].value_json == items["number"].value_json
                steps.append(int(items["_step"].value_json))
    return steps


def records_of_wandb(data: bytes) -> Iterator[bytes]:
    """The whole records of a file: LevelDB's log, after seven bytes."""
    assert data.startswith(_MAGIC)
    place, pieces = 7, b""
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:  # no room for the head of a record
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (_FULL, _LAST) and place <= len(data):
            yield pieces
            pieces = b""


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
def test_steps_are_logged_once_and_the_run_goes_on(
    read: Callable[[Path], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = read.__name__.removeprefix("steps_of_")
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed; pip install '.[{name}]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    command = [sys.executable, "-m", "hvdrecover", "run", "-np", "2", "--no-standby"]
    command += [
        "--checkpoint",
        str(tmp_path / "commits"),
        "--",
        sys.executable,
        str(SCRIPT),
        str(tmp_path),
        name,
    ]
    environ = {**ENVIRON, "HVDRECOVER_EVENTS": str(tmp_path / "events")}

    job = Job(command, tmp_path / "log", environ)
    try:
        deadline = time.monotonic() + PATIENCE
        while not done(tmp_path) or done(tmp_path)[-1] < STOPPED:
            assert time.monotonic() < deadline, job.tail()
            time.sleep(0.1)
    finally:
        job.kill()
    job = Job(command, tmp_path / "log", environ)
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()

    repeated = sorted({step for step in done(tmp_path) if done(tmp_path).count(step) > 1})
    assert KILLED in repeated
    assert any(step > 2 * DURABLE_EVERY for step in repeated)
    logged = read(tmp_path)
    assert len({*logged}) == len(logged)
    assert logged == sorted(logged)
    assert logged == [*range(1, STEPS + 1)]


def done(folder: Path) -> list[int]:
    """The steps that rank 0 has done, repeated ones included."""
    file = folder / "steps"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []
