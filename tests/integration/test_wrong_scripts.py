"""A script that is wrong says so once, and last, whatever it fails of before it has trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.support.jobs import PATIENCE, Job, supervised

# Without a training function: rank 1 is killed once; then the ranks ask for different things.
PLAIN = """
import torch
import hvdrecover.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3 + hvd.rank()), name="x")
"""
TENSORFLOW = 'import tensorflow\nimport hvdrecover.tensorflow\nopen("/not/there")\n'
BACKUP = """
import keras, numpy
import hvdrecover.tensorflow.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
@hvd.elastic.run
def train(state):
    callbacks = [keras.callbacks.BackupAndRestore("backup"), hvd.elastic.CommitStateCallback(state)]
    model.fit(numpy.ones((8, 4)), numpy.ones((8, 1)), epochs=2, verbose=0, callbacks=callbacks)
    print("trained", flush=True)
train(state)
"""
HEADING = "on localhost: an exception before the job's first commit:"

pytestmark = pytest.mark.acceptance


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()


def test_what_horovod_objects_to_in_a_plain_script_is_its_error(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PLAIN)
    jobs.append(Job([*supervised("--no-standby"), "python", "train.py"], tmp_path / "log"))
    assert jobs[0].wait(PATIENCE) == 1
    log = (tmp_path / "log").read_text()
    assert log.count(HEADING) == 1
    assert log.count("HorovodInternalError: Mismatched ALLREDUCE tensor shapes") == 1
    assert "start again" not in log


def test_keras_backups_beside_the_states_callbacks_are_refused(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would restore its own backup, and train another epoch than the others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BACKUP)
    jobs.append(Job([*supervised("--no-standby"), "python", "train.py"], tmp_path / "log"))
    assert jobs[0].wait(PATIENCE) == 1
    log = (tmp_path / "log").read_text()
    assert "BackupAndRestore" in log.rstrip().splitlines()[-1]
    assert (log.count("restarted"), log.count("trained")) == (0, 0)


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        pytest.param("def f(:", "SyntaxError: invalid syntax", marks=LONG),
        pytest.param(TENSORFLOW, "No such file or directory: '/not/there'", marks=LONG),
    ],
)
def test_a_wrong_script_on_two_ranks_is_told_once_and_last(
    script: str, last: str, jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    jobs.append(Job([*supervised(), "python", "train.py"], tmp_path / "log"))
    assert jobs[0].wait(PATIENCE) == 1
    log = (tmp_path / "log").read_text()
    assert log.rstrip().endswith(last)
    assert log.count(last) == 1
    assert log.count("Traceback (most recent call last)") == (script in ("import not_there", TENSORFLOW))
    assert log.count(HEADING) == 1
    assert "exit with status code" not in log  # Horovod's line
    assert script == TENSORFLOW or "<stderr>:" not in log  # which says what processor it has found
    assert jobs[0].processes() == []
