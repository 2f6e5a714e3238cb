from __future__ import annotations

import pytest

from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.missing_hosts import Shortage
from tests.fakes.clock import FakeClock


def told(options: Options, *counts: int) -> list[str]:
    """Return what is told while there are so many guardians, four seconds after one another."""
    clock = FakeClock()
    shortage = Shortage(options, clock)
    messages = []
    for count in counts:
        messages.append(shortage.message(count))
        clock.advance(4.0)
    return [message for message in messages if message]


def test_a_job_that_waits_for_lost_processes_says_so_once_and_how_not_to() -> None:
    (message,) = told(Options(16), 0, 8, 16, 8, 8, 8, 8, 8, 16, 8, 8, 8, 8, 8)
    assert message.startswith("8 of 16 processes are left; the job waits until 16 run again")
    assert "With --min-np 8 it would resume" in message


@pytest.mark.parametrize("counts", [(16, 8, 8, 16, 15, 15, 15, 16), (0, 8, 8, 8, 8, 8), (16, 0, 0, 0, 0, 0)])
def test_what_is_replaced_soon_or_only_begins_or_is_all_gone_is_not_told(counts: tuple[int, ...]) -> None:
    assert told(Options(16), *counts) == []


@pytest.mark.parametrize("options", [Options(16, least=2), Options(16, mpi=True)])
def test_a_job_that_does_not_wait_says_nothing(options: Options) -> None:
    assert told(options, 16, 8, 8, 8, 8, 8) == []
