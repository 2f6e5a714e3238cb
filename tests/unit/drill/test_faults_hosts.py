from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hvdrecover.drill.faults import FAULTS, Switchable
from tests.lab.hosts import Host
from tests.unit.drill.drilled import Counting


@dataclass
class Switch:
    """Notes what it is told; that hosts of the lab do it, the lab's tests show."""

    name: str
    told: list[str] = field(default_factory=list)

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
        yield Counting(tmp_path, stack)


@pytest.mark.parametrize(
    ("name", "told"),
    [("host-cut-off", ["cut off", "join"]), ("host-powered-off", ["power off", "power on"])],
)
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_one_host_is_struck_and_repaired_once(run: Counting, name: str, told: list[str], rank: int) -> None:
    hosts = [Switch("node2"), Switch("node3")]
    run.hosts = hosts
    fault = FAULTS[name]
    assert fault.lacks(run) == ""
    fault.strike(run, rank)
    struck, other = (hosts[rank % 2], hosts[1 - rank % 2])
    assert (struck.told, other.told) == (told[:1], [])
    fault.end(run)
    fault.end(run)
    assert (struck.told, other.told) == (told, [])


def test_two_faults_of_hosts_repair_what_is_theirs(run: Counting) -> None:
    hosts = [Switch("node2"), Switch("node3")]
    run.hosts = hosts
    FAULTS["host-cut-off"].strike(run, 0)
    FAULTS["host-powered-off"].strike(run, 1)
    FAULTS["host-cut-off"].end(run)
    assert [host.told for host in hosts] == [["cut off", "join"], ["power off"]]


def test_hosts_of_the_lab_can_be_switched() -> None:
    wanted = {name for name in vars(Switchable) if not name.startswith("_")}
    assert wanted == {"cut_off", "join", "power_off", "power_on"}
    assert wanted <= set(vars(Host))
