from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError, RecoveryError, RemovedError, RendezvousError
from hvdrecover.state import horovod


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (HorovodInternalError("a rank was lost"), "peers"),
        (HostsUpdatedInterrupt(False), "hosts"),
        (HostsUpdatedInterrupt(True), "hosts"),
        (RuntimeError("CUDA error"), None),
        (KeyboardInterrupt(), None),
        (ConnectionError("what the framework makes of a lost rank"), "peers"),
        (ValueError("Horovod is shutting down."), "peers"),  # by hvd.add_process_set()
    ],
)
def test_what_an_error_means(error: BaseException, fault: str | None) -> None:
    world = SimpleNamespace(lost=lambda error: isinstance(error, ConnectionError))
    assert horovod.fault_of(error, world) == fault


class FakeHorovod:
    """Horovod's module of a framework: its library, and an ``init`` that fails, or notes the process sets."""

    def __init__(self, reason: str | None, *, fails: bool = True) -> None:
        self.fails, self.made = fails, [SimpleNamespace(process_set_id=None, ranks=None)]
        self.allowed: list[int] = []
        library = SimpleNamespace()
        if reason is not None:
            library.horovod_initialization_error = lambda: reason.encode()
            library.horovod_set_stall_shutdown_seconds = self.allowed.append
        self.mpi_ops = SimpleNamespace(_basics=SimpleNamespace(MPI_LIB_CTYPES=library))

    def init(self, process_sets: list[Any]) -> None:
        self.made = process_sets
        if self.fails:
            raise ValueError("Horovod initialization failed")


@pytest.mark.parametrize(
    ("reason", "kind", "message"),
    [
        ("h1[0] has been removed from elastic job", RemovedError, "h1[0] has been removed from elastic job"),
        ("Connection reset by peer", RendezvousError, "Connection reset by peer"),
        ("", RendezvousError, "Horovod initialization failed"),
        (None, RendezvousError, "Horovod initialization failed"),  # a Horovod that we have not built
    ],
)
def test_why_a_rendezvous_has_failed(reason: str | None, kind: type[Exception], message: str) -> None:
    with pytest.raises(RecoveryError) as caught:
        horovod.HorovodWorld(FakeHorovod(reason)).init()
    assert (type(caught.value), str(caught.value)) == (kind, message)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_host_that_was_removed_is_told_from_an_init_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HorovodInternalError, "__init__", HorovodInternalError.__init__)
    told: list[Any] = []
    for reason in ("Connection reset by peer", "h1[0] has been removed from elastic job"):
        hvd = FakeHorovod(reason)
        library = hvd.mpi_ops._basics.MPI_LIB_CTYPES
        library.horovod_init = lambda *_: 0
        monkeypatch.setattr(heartbeat, "enter", lambda phase, reason=reason: told.append((phase, reason)))
        horovod._note_start(hvd)
        assert library.horovod_init() == 0
    assert told == [(heartbeat.Phase.REMOVED, "h1[0] has been removed from elastic job")]


def test_process_sets_are_made_again_but_for_those_that_were_removed() -> None:
    hvd = FakeHorovod("", fails=False)
    sets = [SimpleNamespace(process_set_id=number, ranks=[0]) for number in (1, None, 3)]
    hvd.mpi_ops._basics.process_sets = sets
    horovod.HorovodWorld(hvd).init()
    assert hvd.made == [sets[0], sets[2]]


def test_a_process_set_whose_ranks_no_longer_exist_is_an_error_of_the_script() -> None:
    hvd = FakeHorovod("Tried to register process set with invalid rank: 1")
    hvd.mpi_ops._basics.process_sets = [SimpleNamespace(process_set_id=1, ranks=[0, 1])]
    with pytest.raises(ConfigError, match=r"invalid rank: 1.*\[\[0, 1\]\]") as caught:
        horovod.HorovodWorld(hvd).init()
    assert caught.value.name == "process_sets"


def test_our_own_horovod_is_told_how_long_ranks_may_wait_and_another_one_is_not() -> None:
    ours, another = FakeHorovod(""), FakeHorovod(None)
    for each in (ours, another):
        horovod.HorovodWorld(each).allow_stalls(7)
    assert (ours.allowed, another.allowed) == ([7], [])


def test_who_takes_anothers_place_begins_alone_and_asks_for_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1")
    seen: list[tuple[str, bool]] = []

    def note(name: str) -> None:
        seen.append((name, "HOROVOD_RANK" in os.environ or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ))

    hvd = SimpleNamespace(init=lambda: note("init"), shutdown=lambda: note("shutdown"))
    horovod.rendezvous_alone(hvd)
    assert seen == [("init", False), ("shutdown", False)]
    assert os.environ["HOROVOD_RANK"] == "1"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("No Adasum operation enabled", "op"),
        ("Allgather is not supported with Join at this time. Specify sparse_to_dense=True", "hvd.join"),
    ],
)
def test_a_mistake_of_the_script_is_no_lost_rank(text: str, name: str) -> None:
    try:
        raise HorovodInternalError(RuntimeError(text))
    except HorovodInternalError as error:
        mistake = horovod.mistake_of(error)
        assert isinstance(mistake, ConfigError) and mistake.name == name
        assert mistake.__traceback__ is error.__traceback__
    assert horovod.mistake_of(HorovodInternalError("Horovod has been shut down")) is None
