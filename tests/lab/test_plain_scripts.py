"""A script for plain Horovod on several hosts: it starts again after the loss of one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gates import GatedRun
from tests.support.lab import INTERFACE, SLOW_HOSTS, Lab

SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "plain.py"

pytestmark = pytest.mark.acceptance


@pytest.fixture
def gated(lab: Lab, tmp_path: Path) -> Iterator[GatedRun]:
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{host.address}:1\n" for host in lab.hosts))
    options = ["--discover", f"file {hosts}", "--network-interface", INTERFACE, "-i", os.fspath(lab.key)]
    # Three hosts for two ranks: one is a spare.
    run = GatedRun(SCRIPT, tmp_path, *options, "--max-np", "2", place=lab.hosts[0].command)
    yield run
    run.kill()


def test_a_host_loses_its_power_and_a_spare_takes_its_place(
    gated: GatedRun, lab: Lab, tmp_path: Path
) -> None:
    undisturbed = GatedRun(SCRIPT, tmp_path / "undisturbed", "--no-standby")
    undisturbed.begin(0, 1, 2, 3)
    expected = undisturbed.printed("weights")

    job = gated.begin(0, **SLOW_HOSTS, OMP_NUM_THREADS="1")
    first = gated.at(1)
    (lost,) = [host for host in lab.hosts if first[1] in host.processes()]
    lost.power_off()
    gated.at(1, other_than=first)
    gated.open(1, 2, 3)

    assert gated.printed("weights") == expected
    assert re.findall(r"begins 0 2 (\d)", job.log.read_text()) == ["0", "1"]
