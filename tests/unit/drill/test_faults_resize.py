from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdrecover.drill.faults import FAULTS
from tests.unit.drill.drilled import Counting
from tests.unit.launch.children import environment

RESIZE = FAULTS["resize"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Counting]:
    with ExitStack() as stack:
        run = Counting(tmp_path, stack, ranks=4)
        run.resizes = True
        RESIZE.prepare(run)
        yield run


def hosts(run: Counting) -> list[str]:
    """Return what the run discovers."""
    words = RESIZE.options(run)
    source, *rest = shlex.split(words[words.index("--discover") + 1])
    command = [sys.executable, "-m", "hvdrecover", "discover", source, "--no-ssh-check", *rest]
    return subprocess.check_output(command, text=True, env=environment()).split()


def test_it_begins_with_a_host_for_each_rank_all_of_which_are_this_one(run: Counting) -> None:
    found = [each.rpartition(":") for each in hosts(run)]
    assert len({name for name, _, _ in found}) == 4
    assert {(socket.gethostbyname(name), slots) for name, _, slots in found} == {("127.0.0.1", "1")}


def test_hosts_leave_and_come_and_one_stays(run: Counting) -> None:
    listing = run.folder / "resized.txt"
    sizes, before = [], listing.read_text().split()
    for rank in (0, 0, 1, 1, 2, 3):
        RESIZE.strike(run, rank)
        now = listing.read_text().split()
        assert set(now) & set(before)
        assert len(now) != len(before)
        if len(now) < len(before):
            assert before[0] not in now
        sizes.append(len(now))
        before = now
    assert sizes == [1, 2, 3, 2, 4, 1]


def test_it_needs_room_and_the_hosts_for_itself(run: Counting) -> None:
    assert RESIZE.lacks(run) == ""
    run.names_hosts = True
    assert "leave out -H" in RESIZE.lacks(run)
    run.names_hosts, run.size = False, 1
    assert "-np 2" in RESIZE.lacks(run)
