from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdrecover import config

config.quiet_tensorflow()

import horovod.tensorflow as hvd  # noqa: E402
import pytest  # noqa: E402

# This also chooses a controller for a process that no launcher started.
from hvdrecover.tensorflow import finite  # noqa: E402
from tests.unit import alone  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def one_process() -> None:
    alone.init(hvd)


@pytest.fixture(autouse=True)
def horovod_for_tensorflow() -> None:
    alone.turn_to(hvd)
    alone.start()


@pytest.fixture(params=["compiled", "TensorFlow's"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test is run with each kind of operations that look at gradients."""
    if request.param == "compiled":
        assert finite._operations is not None
    else:
        monkeypatch.setattr(finite, "_operations", None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The place where a checkpoint root may be made."""
    return tmp_path / "root"


@pytest.fixture
def job(root: Path) -> dict[int, Any]:
    """The contents of model and optimizer at each of the three commits that a job has written to the root."""
    from tests.unit.tensorflow.jobs import write_three_commits

    return write_three_commits(root)
