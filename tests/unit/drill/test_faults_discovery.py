from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdrecover.discovery.sources.command import Command
from hvdrecover.drill.faults import FAULTS
from hvdrecover.errors import DiscoveryError
from tests.unit.drill.drilled import Counting
from tests.unit.launch.children import child, environment, gone, line

FAILS, HANGS = FAULTS["discovery-fails"], FAULTS["discovery-hangs"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Counting]:
    folder = tmp_path / "a folder"  # with a space, as users have them
    folder.mkdir()
    with ExitStack() as stack:
        run = Counting(folder, stack, ranks=3)
        FAILS.prepare(run)
        HANGS.prepare(run)
        yield run


def hosts(run: Counting, timeout: float = 60.0) -> list[str]:
    program = str(run.folder / "discovery")
    return [f"{host.name}:{host.slots}" for host in Command((program,)).hosts(environment(), timeout)]


def test_it_names_this_host_with_all_slots(run: Counting) -> None:
    assert hosts(run) == ["localhost:3"]


def test_it_names_the_hosts_of_a_lab(tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = Counting(tmp_path, stack)
        run.slots = ["10.0.0.1:1", "10.0.0.2:1"]
        FAILS.prepare(run)
        assert hosts(run) == run.slots


def test_it_fails_and_a_rank_dies_until_it_is_over(run: Counting) -> None:
    FAILS.strike(run, 1)
    assert run.children["1"].wait(60) == -signal.SIGKILL
    with pytest.raises(DiscoveryError, match=" 1: the inventory can't be reached"):
        hosts(run)
    FAILS.end(run)
    assert hosts(run) == ["localhost:3"]


def test_it_hangs_and_a_rank_dies_until_it_is_over(run: Counting) -> None:
    HANGS.strike(run, 2)
    assert run.children["2"].wait(60) == -signal.SIGKILL
    with pytest.raises(DiscoveryError, match=r" 0\.5 s$"):
        hosts(run, timeout=0.5)
    HANGS.end(run)
    assert hosts(run) == ["localhost:3"]


def test_one_that_hangs_ends_when_that_is_over(run: Counting) -> None:
    HANGS.strike(run, 0)
    with subprocess.Popen([run.folder / "discovery"]) as hanging:
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.wait(0.3)
        HANGS.end(run)
        assert hanging.wait(60) == 1


def test_one_that_hangs_does_not_outlive_who_started_it(run: Counting) -> None:
    HANGS.strike(run, 0)
    code = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.argv[1]]).pid, flush=True)\n"
        "time.sleep(600)"
    )
    with child(code, str(run.folder / "discovery")) as parent:
        hanging = int(line(parent))
        parent.kill()
        parent.wait()
        gone(hanging)


def test_the_run_is_started_with_it(run: Counting) -> None:
    option, words = FAILS.options(run)
    assert option == "--discover"
    source, *rest = shlex.split(words)
    command = [sys.executable, "-m", "hvdrecover", "discover", source, "--no-ssh-check", *rest]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (done.stdout, done.stderr) == ("localhost:3\n", "")
    assert list((run.folder / "hosts").iterdir())  # what is remembered stays with the run


def test_both_give_the_same_options(run: Counting) -> None:
    assert FAILS.options(run) == HANGS.options(run)
