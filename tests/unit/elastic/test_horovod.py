from __future__ import annotations

from types import SimpleNamespace

import pytest
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvdrecover.elastic import horovod


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (HorovodInternalError("a rank was lost"), "peers"),
        (HostsUpdatedInterrupt(False), "hosts"),
        (HostsUpdatedInterrupt(True), "hosts"),
        (RuntimeError("CUDA error"), None),
        (KeyboardInterrupt(), None),
        (ConnectionError("what the framework makes of a lost rank"), "peers"),
    ],
)
def test_what_an_error_means(error: BaseException, fault: str | None) -> None:
    world = SimpleNamespace(lost=lambda error: isinstance(error, ConnectionError))
    assert horovod.fault_of(error, world) == fault


def test_an_interrupt_never_asks_to_skip_the_meeting() -> None:
    interrupt = horovod.hosts_updated()
    assert isinstance(interrupt, HostsUpdatedInterrupt)
    assert not interrupt.skip_sync


def test_the_version_is_that_of_the_installed_package() -> None:
    assert horovod.version().startswith("0.")
