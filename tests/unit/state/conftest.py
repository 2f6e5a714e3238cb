from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdrecover.heartbeat import Page
from tests.fakes.page import new_page
from tests.fakes.root import FakeRoot, FakeRoots
from tests.fakes.world import alone
from tests.unit.state.jobs import URL, Process


@pytest.fixture(autouse=True)
def elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process in an elastic job, but without a driver to report to."""
    for name in (
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HVDRECOVER_CHECKPOINT",
        "HVDRECOVER_EVENTS",
        "HVDRECOVER_LOG",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """The page of this process, which ranks that are threads share; new for each test."""
    return new_page(monkeypatch)


@pytest.fixture(autouse=True)
def roots(monkeypatch: pytest.MonkeyPatch) -> FakeRoots:
    """Checkpoint roots in memory, in place of all others."""
    roots = FakeRoots()
    monkeypatch.setattr("hvdrecover.state.durable.open_storage", roots.open)
    return roots


@pytest.fixture
def root(roots: FakeRoots) -> FakeRoot:
    return roots[URL]


@pytest.fixture
def process() -> Iterator[Process]:
    """A process that is a job of its own, and has been initialised."""
    process = Process(alone())
    process.world.init()
    yield process
    process.end()
