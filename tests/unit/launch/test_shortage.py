from __future__ import annotations

import pytest

from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.shortage import Shortage
from tests.fakes.clock import FakeClock


def lines(caplog: pytest.LogCaptureFixture, options: Options, *counts: int) -> list[str]:
    """Return what is logged while there are so many guardians, four seconds after one another."""
    clock = FakeClock()
    shortage = Shortage(options, clock)
    for count in counts:
        shortage.look(count)
        clock.advance(4.0)
    return caplog.messages


def test_a_job_that_waits_for_lost_processes_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = lines(caplog, Options(16), 0, 8, 16, 8, 8, 8, 8, 8, 16, 8, 8, 8, 8, 8)
    assert message.startswith("8 of 16 processes are left; the job waits until 16 run again")
    assert "With --min-np 8 it would resume" in message


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (Options(16), (16, 8, 8, 16, 15, 15, 15, 16)),
        (Options(16), (0, 8, 8, 8, 8, 8)),
        (Options(16), (16, 0, 0, 0, 0, 0)),
        (Options(16, least=2), (16, 8, 8, 8, 8, 8)),
        (Options(16, mpi=True), (16, 8, 8, 8, 8, 8)),
    ],
)
def test_a_job_that_does_not_wait_for_long_says_nothing(
    options: Options, counts: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert lines(caplog, options, *counts) == []
