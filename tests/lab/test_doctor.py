"""``hvdrecover doctor`` with three hosts: all well; one cut off, one with a wrong clock and no Horovod."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover.drill.lab import INTERFACE, Lab
from tests.support.commands import wait_until
from tests.support.lab import SLOW_HOSTS

PATIENCE = 400.0  # seconds

# Each Python that ssh starts runs this first. One host gets another time there, and cannot import Horovod.
FAULTS = """
import os, sys, time
if os.environ.get("SSH_CONNECTION", "").split()[2:3] == [{address!r}]:
    right = time.time
    time.time = lambda: right() + 90
    sys.modules["horovod"] = None
"""


def doctor(lab: Lab, *words: str, environ: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "hvdrecover", "doctor", "--json", "-i", os.fspath(lab.key)]
    command += ["-H", ",".join(f"{name}:1" for name in names(lab)), *words]
    process = lab.hosts[0].run(command, {**SLOW_HOSTS, **(environ or {})})
    output, errors = process.communicate(timeout=PATIENCE)
    assert errors == "", errors
    # Their ssh servers; one's process for a login ends after it.
    wait_until(lambda: [len(host.processes()) for host in lab.hosts] == [1, 1, 1])
    found: dict[str, Any] = {}
    for finding in json.loads(output)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return process.returncode, found


def names(lab: Lab) -> Sequence[str]:
    return [host.name for host in lab.hosts]


def test_three_hosts_that_are_well(lab: Lab, tmp_path: Path) -> None:
    code, found = doctor(lab, "--checkpoint", str(tmp_path / "root"))
    wrong = [finding for findings in found.values() for finding in findings if finding["outcome"] != "ok"]
    assert (code, wrong) == (0, [])
    (network,) = found["network"]
    for host in lab.hosts:
        assert f"{host.name} {INTERFACE} {host.address}" in network["what"]
    (shared,) = found["root: shared"]
    (ssh,) = found["ssh"]
    for name in names(lab)[1:]:
        assert name in shared["what"] and name in ssh["what"]
    assert not (tmp_path / "root").exists()


def test_one_host_cut_off_and_one_with_a_wrong_clock_and_no_horovod(lab: Lab, tmp_path: Path) -> None:
    first, second, third = lab.hosts
    third.cut_off()
    (tmp_path / "sitecustomize.py").write_text(FAULTS.format(address=second.address))
    environ = {"PYTHONPATH": str(tmp_path)}
    code, found = doctor(lab, "--checkpoint", "memory://root", environ=environ)
    assert code == 1
    well, lost = found["ssh"]
    assert well["what"].startswith(f"{second.name}: ")
    assert (lost["outcome"], lost["at_fault"]) == ("failure", [third.name])
    assert "firewall" in lost["remedy"]
    assert [each["outcome"] for each in found["network"]] == ["ok"]
    (clocks,) = found["clocks"]
    assert clocks["outcome"] == "warning"
    ahead, wrong = re.findall(rf"{second.name} \+(\S+) s \(± (\S+) s\)", clocks["what"])[0]
    assert abs(float(ahead) - 90) <= float(wrong) + 0.1  # both are rounded
    assert [(each["outcome"], each["at_fault"]) for each in found["horovod"]] == [
        ("failure", [second.name]) for _ in found["horovod"]
    ]
    (shared,) = found["root: shared"]
    assert shared["outcome"] == "warning"
    assert shared["what"] == f"{second.name} cannot see the file that {first.name} wrote"
