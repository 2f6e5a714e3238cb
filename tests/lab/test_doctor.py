"""``hvdrecover doctor`` over three hosts that are well, cut off, have a wrong clock, share no folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover.drill.lab.hosts import INTERFACE
from hvdrecover.drill.lab.lab import Lab
from tests.integration.test_endings import wait_until

PATIENCE = 400.0  # seconds

# Every Python that is logged in to runs this at its start, and one host's is to have another time.
WRONG_CLOCK = """
import os, time
right = time.time
if os.environ.get("SSH_CONNECTION", "").split()[2:3] == [{address!r}]:
    time.time = lambda: right() + 90
"""


def doctor(lab: Lab, *words: str, environ: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Exit code and the findings of each check."""
    command = [sys.executable, "-m", "hvdrecover", "doctor", "--json", "-i", os.fspath(lab.key)]
    command += ["-H", ",".join(f"{name}:1" for name in names(lab)), *words]
    process = lab.hosts[0].run(command, environ)
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
    assert {host: each["address"] for host, each in network["facts"]["hosts"].items()} == {
        host.name: host.address for host in lab.hosts
    }
    assert {each["interface"] for each in network["facts"]["hosts"].values()} == {INTERFACE}
    assert set(found["allreduce: torch"][0]["facts"]["hosts"].values()) == set(names(lab))
    assert set(found["root: shared"][0]["facts"]["hosts"]) == set(names(lab)[1:])
    assert set(found["ssh"][0]["facts"]["hosts"]) == set(names(lab)[1:])
    assert not (tmp_path / "root").exists()


def test_one_cut_off_one_with_a_wrong_clock_and_a_root_of_one_host(lab: Lab, tmp_path: Path) -> None:
    first, second, third = lab.hosts
    third.cut_off()
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK.format(address=second.address))
    environ = {"PYTHONPATH": str(tmp_path)}
    code, found = doctor(lab, "--checkpoint", "memory://root", environ=environ)
    assert code == 1
    well, lost = found["ssh"]
    assert well["facts"]["hosts"] == [second.name]
    assert (lost["outcome"], lost["facts"]["host"]) == ("failure", third.name)
    assert "firewall" in lost["remedy"]
    assert [each["outcome"] for each in found["allreduce"]] == ["skipped"]
    assert [each["outcome"] for each in found["network"]] == ["ok"]
    (clocks,) = found["clocks"]
    assert clocks["outcome"] == "warning"
    assert round(clocks["facts"]["seconds_ahead"][second.name]) == 90
    (shared,) = found["root: shared"]
    assert (shared["outcome"], shared["facts"]["hosts"]) == ("warning", {second.name: False})
    assert shared["facts"]["writer"] == first.name
