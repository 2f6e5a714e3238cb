"""Tests with tensors on a CUDA device; skipped without one. ``DEVICE=cpu`` tries the tests themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.integration.conftest import jobs, start  # noqa: F401
from tests.unit.torch.conftest import horovod_for_torch, no_settings, one_process, roots, seeded  # noqa: F401

DEVICE = os.environ.get("DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if lacking:
                item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def the_same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels whose sums are taken in the same order each time; jobs that are started take the variable."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
