from __future__ import annotations

import random
from collections.abc import Iterator

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvdrecover.torch  # noqa: F401  (chooses Horovod's controller, before it is initialised)
from tests.fakes.root import FakeRoots
from tests.support import alone


@pytest.fixture(scope="session", autouse=True)
def one_process() -> Iterator[None]:
    """A job of one process, on one thread so that sums are always taken in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone.init(hvd)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def horovod_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # The watch that a state of virtual ranks sets on Horovod's library ends with the test.
    monkeypatch.setattr(hvd.mpi_ops, "mpi_lib", hvd.mpi_ops.mpi_lib)
    alone.turn_to(hvd)
    alone.start()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_ELASTIC", "HVDRECOVER_CHECKPOINT", "HVDRECOVER_EVENTS", "HVDRECOVER_LOG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's optimizers have their hooks in a job of one, too, as in an elastic job."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> FakeRoots:
    """Checkpoint roots in memory, in place of all others."""
    roots = FakeRoots()
    monkeypatch.setattr("hvdrecover.state.durable.open_storage", roots.open)
    return roots
