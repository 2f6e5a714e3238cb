from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hvdrecover.drill.faults import FAULTS, Switchable
from hvdrecover.drill.lab.hosts import Host
from hvdrecover.errors import DrillError
from tests.unit.drill.drilled import Counting


@dataclass
class Switch:
    """Notes what it is told; that hosts of the lab do it, the lab's tests show."""

    name: str
    pids: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def processes(self) -> list[int]:
        return self.pids

    def cut_off(self) -> None:
        self.told.append("cut off")

    def join(self) -> None:
        self.told.append("join")

    def power_off(self) -> None:
        self.told.append("power off")

    def power_on(self) -> None:
        self.told.append("power on")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Counting]:
    with ExitStack() as stack:
        yield Counting(tmp_path, stack, ranks=3)


def hosts_of(run: Counting, *ranks: int | None) -> list[Switch]:
    """Hosts that these ranks are on; None for a spare one."""
    run.hosts = hosts = [
        Switch(f"node{number}", [] if rank is None else [run.process_of(rank)])
        for number, rank in enumerate(ranks, 2)
    ]
    return hosts


@pytest.mark.parametrize(
    ("name", "told"),
    [("host-cut-off", ["cut off", "join"]), ("host-powered-off", ["power off", "power on"])],
)
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_the_host_that_is_told_of_is_struck_and_repaired_once(
    run: Counting, name: str, told: list[str], rank: int
) -> None:
    spare, *used = hosts_of(run, None, 1, 2)  # rank 0 is on the host of the supervisor
    fault = FAULTS[name]
    assert fault.lacks(run) == ""
    struck, other = used[rank % 2], used[1 - rank % 2]
    assert fault.whom(rank, run.size) == f"the host of rank {1 + rank % 2}"
    assert fault.ready(run)
    fault.strike(run, rank)
    assert (struck.told, other.told, spare.told) == (told[:1], [], [])
    fault.end(run)
    fault.end(run)
    assert (struck.told, other.told, spare.told) == (told, [], [])
    assert not fault.ready(run)  # not before discovery finds all hosts well
    assert FAULTS["kill"].ready(run)


def test_two_faults_of_hosts_repair_what_is_theirs(run: Counting) -> None:
    hosts = hosts_of(run, 1, 2)
    FAULTS["host-cut-off"].strike(run, 0)
    FAULTS["host-powered-off"].strike(run, 1)
    FAULTS["host-cut-off"].end(run)
    assert [host.told for host in hosts] == [["cut off", "join"], ["power off"]]


def test_no_host_is_struck_if_all_ranks_are_on_the_first(run: Counting) -> None:
    (spare,) = hosts_of(run, None)
    with pytest.raises(DrillError, match=f"^{run.folder}: .*'host-cut-off'"):
        FAULTS["host-cut-off"].strike(run, 0)
    assert spare.told == []


def test_what_they_lack_names_the_option(run: Counting) -> None:
    assert "--lab 4 makes them" in FAULTS["host-cut-off"].lacks(run)
    run.size = 1
    assert "-np 2 --lab 3" in FAULTS["host-cut-off"].lacks(run)


def test_hosts_of_the_lab_can_be_switched() -> None:
    wanted = {name for name in vars(Switchable) if not name.startswith("_")}
    assert wanted == {"cut_off", "join", "power_off", "power_on", "processes"}
    assert wanted <= set(vars(Host))
