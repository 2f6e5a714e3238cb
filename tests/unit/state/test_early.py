"""Collectives before the training function, in a process that joins a running job."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hvdrecover import heartbeat
from hvdrecover.config import Config
from hvdrecover.errors import EarlyCollectiveError
from hvdrecover.state import horovod
from hvdrecover.virtual.ranks import Watched
from tests.unit.state.jobs import CONFIG

Driver = Callable[[str | None], Config]


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Starts a driver that is asked for its round, and returns the settings of a process that asks it."""
    servers: list[HTTPServer] = []

    def start(answer: str | None) -> Config:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(404 if answer is None or self.path != "/round/now" else 200)
                self.end_headers()
                self.wfile.write((answer or "").encode())

            def log_message(self, *args: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return dataclasses.replace(CONFIG, rendezvous=("127.0.0.1", server.server_port))

    yield start
    horovod.training_begins()
    for server in servers:
        server.shutdown()
        server.server_close()


class FakeHorovod(SimpleNamespace):
    """Horovod's module for a framework; what it was called with."""

    def __init__(self, library: str, *collectives: str) -> None:
        self.calls: list[str] = []
        self.ready = True
        native = SimpleNamespace(**{name: self._function(name) for name in collectives})
        names = {*horovod._SKIPPED[library], *horovod._REFUSED}
        functions = {name: self._function(name) for name in names}
        super().__init__(mpi_ops=SimpleNamespace(**{library: native}), **functions)

    def is_initialized(self) -> bool:
        return self.ready

    def _function(self, name: str) -> Callable[..., Any]:
        def function(obj: Any = None, root_rank: int = 0) -> Any:
            self.calls.append(name)
            return "everybody's"

        function.__name__ = name
        return function


def torch() -> FakeHorovod:
    return FakeHorovod("mpi_lib", "horovod_torch_allreduce_async_torch_FloatTensor", "horovod_torch_poll")


def test_broadcasts_of_what_the_state_brings_return_at_once(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    hvd = torch()
    caplog.set_level("DEBUG", "hvdrecover")
    horovod.watch_early_collectives(hvd, driver("2"))
    assert hvd.broadcast_parameters({}) is None
    assert hvd.broadcast_optimizer_state(None) is None
    assert hvd.broadcast_object("mine", root_rank=0) == hvd.broadcast_object(obj="mine") == "mine"
    assert hvd.calls == []
    levels = [record.levelname for record in caplog.records if "joins a running job" in record.message]
    assert levels == ["DEBUG", "DEBUG", "WARNING", "WARNING"]


@pytest.mark.parametrize(
    ("library", "collective", "call"),
    [
        ("mpi_lib", "horovod_torch_allreduce_async_torch_FloatTensor", "hvd.allreduce"),
        ("mpi_lib", "horovod_torch_grouped_allreduce_async_torch_FloatTensor", "hvd.grouped_allreduce"),
        ("mpi_lib", "horovod_torch_broadcast_async_torch_IntTensor", "hvd.broadcast"),
        ("mpi_lib", "horovod_torch_join", "hvd.join"),
        ("mpi_lib", "horovod_torch_barrier", "hvd.barrier"),
        ("MPI_LIB", "horovod_allgather", "hvd.allgather"),
        ("MPI_LIB", "horovod_broadcast_inplace_resource", "hvd.broadcast"),
        ("MPI_LIB", "horovod_alltoall", "hvd.alltoall"),
    ],
)
def test_other_collectives_are_refused_by_name(
    library: str, collective: str, call: str, driver: Driver
) -> None:
    hvd = FakeHorovod(library, collective)
    horovod.watch_early_collectives(hvd, driver("3"))
    with pytest.raises(EarlyCollectiveError) as caught:
        getattr(getattr(hvd.mpi_ops, library), collective)()
    assert (caught.value.call, hvd.calls) == (call, [])


def test_a_watch_of_virtual_ranks_outlasts_the_beginning_of_the_training_function(driver: Driver) -> None:
    hvd = torch()
    horovod.watch_early_collectives(hvd, driver("2"))
    called: list[str] = []

    def look(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        called.append(call)
        return function

    hvd.mpi_ops.mpi_lib = Watched(hvd.mpi_ops.mpi_lib, look)
    horovod.training_begins()
    hvd.mpi_ops.mpi_lib.horovod_torch_allreduce_async_torch_FloatTensor()
    assert (called, len(hvd.calls)) == (["allreduce"], 1)


@pytest.mark.parametrize(
    ("answer", "rejoins", "joins"),
    [("1", True, False), ("2", False, True), (None, True, True), (None, False, False)],
)
def test_the_driver_knows_whether_the_job_runs_else_the_guardian(
    answer: str | None, rejoins: bool, joins: bool, driver: Driver
) -> None:
    hvd = torch()
    horovod.watch_early_collectives(hvd, dataclasses.replace(driver(answer), rejoins=rejoins))
    assert (hvd.broadcast_object("mine") == "mine") == joins


def test_from_the_training_function_on_all_are_horovods_own(driver: Driver) -> None:
    hvd = torch()
    library = hvd.mpi_ops.mpi_lib
    horovod.watch_early_collectives(hvd, driver("2"))
    horovod.training_begins()
    assert hvd.mpi_ops.mpi_lib is library
    assert hvd.broadcast_object("mine") == "everybody's"


class Lazy(ModuleType):
    """A module that imports another when anything looks at it."""

    @property
    def __spec__(self) -> None:  # type: ignore[override]
        sys.modules[f"{self.__name__}.part"] = ModuleType("part")


def test_libraries_are_reported_though_one_imports_another_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[list[str]] = []
    monkeypatch.setattr(sys, "modules", {"lazy": Lazy("lazy"), **sys.modules})
    monkeypatch.setattr(heartbeat, "notify", lambda modules: noted.append(modules))
    heartbeat.page.commits = 2
    horovod._report_modules()
    assert "json" in noted[0]
