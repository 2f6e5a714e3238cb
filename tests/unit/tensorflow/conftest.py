from __future__ import annotations

from hvdrecover import config

config.quiet_tensorflow()

import horovod.tensorflow as hvd  # noqa: E402
import pytest  # noqa: E402

import hvdrecover.tensorflow  # noqa: E402, F401  chooses a controller for a process that no launcher started


@pytest.fixture(autouse=True, scope="session")
def alone() -> None:
    hvd.init()
