from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdrecover import config

config.quiet_tensorflow()

import horovod.tensorflow as hvd  # noqa: E402
import pytest  # noqa: E402

# This also chooses a controller for a process that no launcher started.
import hvdrecover.tensorflow  # noqa: E402, F401
from tests.unit import alone  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def one_process() -> None:
    alone.init(hvd)


@pytest.fixture(autouse=True)
def horovod_for_tensorflow() -> None:
    alone.turn_to(hvd)
    alone.start()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The place where a checkpoint root may be made."""
    return tmp_path / "root"


@pytest.fixture
def job(root: Path) -> dict[int, Any]:
    """The contents of model and optimizer at each of the three commits that a job has written to the root."""
    from tests.unit.tensorflow.jobs import write_three_commits

    return write_three_commits(root)
