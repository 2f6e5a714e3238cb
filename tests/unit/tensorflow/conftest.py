from __future__ import annotations

import pytest

from hvdrecover import config

config.quiet_tensorflow()
pytest.importorskip("tensorflow")
pytest.importorskip("horovod")

import hvdrecover.tensorflow  # noqa: E402, F401  chooses a controller for a process that no launcher started
import horovod.tensorflow as hvd  # noqa: E402, I001


@pytest.fixture(autouse=True, scope="session")
def alone() -> None:
    hvd.init()
