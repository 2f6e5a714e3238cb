"""A worker that comes to a running job, and takes its time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.support.jobs import ROOT_MAY_USE_MPI, elastic, run_job, supervised

SCRIPT = Path(__file__).with_name("scripts") / "late_worker.py"

pytestmark = pytest.mark.acceptance


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def run(folder: Path, hosts: Path, launcher: Sequence[str], workers: int, lost: bool = False) -> list[int]:
    """Run the script to its end; return the number of processes that started as each rank."""
    hosts.write_text(f"localhost:{workers}\n")
    command = [*launcher, sys.executable, str(SCRIPT), str(folder)]
    settings = {"HOSTS": str(hosts), "LOST": str(int(lost)), "HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}
    log = run_job(command, folder / "log", {**ROOT_MAY_USE_MPI, **settings})
    assert (folder / "came").exists()
    assert (folder / "sizes").read_text().split() == [str(workers), str(workers + 1)], log
    return [len((folder / str(rank)).read_text().split()) for rank in range(workers + 1)]


def test_the_others_wait_for_it(tmp_path: Path, hosts: Path) -> None:
    assert run(tmp_path, hosts, elastic(hosts, 1), 1) == [1, 1]


@LONG
def test_it_takes_its_place_though_another_is_lost_meanwhile(tmp_path: Path, hosts: Path) -> None:
    launcher = supervised("--no-standby", "--min-np", "1", "--discover", f"file {hosts}", workers=2)
    assert run(tmp_path, hosts, launcher, 2, lost=True) == [1, 2, 1]
