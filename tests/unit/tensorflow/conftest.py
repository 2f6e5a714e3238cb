from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import pytest

# This also chooses a controller for a process that no launcher started.
import hvdrecover.tensorflow  # noqa: F401
from tests.support import alone


@pytest.fixture(autouse=True, scope="session")
def one_process() -> None:
    alone.init(hvd)


@pytest.fixture(autouse=True)
def horovod_for_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    # The watch that a state of virtual ranks sets on Horovod's library ends with the test.
    monkeypatch.setattr(hvd.mpi_ops, "MPI_LIB", hvd.mpi_ops.MPI_LIB)
    alone.turn_to(hvd)
    alone.start()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The place where a checkpoint root may be made."""
    return tmp_path / "root"


@pytest.fixture(scope="session")
def written_once(one_process: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A root with three commits that a job has written, and what model and optimizer held at each."""
    from tests.unit.tensorflow.jobs import write_three_commits

    alone.turn_to(hvd)
    alone.start()
    root = tmp_path_factory.mktemp("job") / "root"
    return root, write_three_commits(root)


@pytest.fixture
def job(root: Path, written_once: tuple[Path, dict[int, Any]]) -> dict[int, Any]:
    """The contents of model and optimizer at each of the three commits; the root is a copy of theirs."""
    shutil.copytree(written_once[0], root)
    return written_once[1]
