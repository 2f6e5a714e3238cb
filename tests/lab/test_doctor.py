"""``hvdrecover doctor`` over three hosts: all well; one cut off, one whose clock and products are wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover.drill.lab.hosts import INTERFACE
from hvdrecover.drill.lab.lab import Lab
from tests.integration.conftest import LONG, Start
from tests.integration.faults import FaultyRun
from tests.lab.conftest import SLOW_HOSTS
from tests.waiting import wait_until

PATIENCE = 400.0  # seconds

# Every Python that is logged in to runs this at its start, and one host's is to have another time.
WRONG_CLOCK = """
import os, time
right = time.time
if os.environ.get("SSH_CONNECTION", "").split()[2:3] == [{address!r}]:
    time.time = lambda: right() + 90
"""

# There, matrix products have one bit wrong.
WRONG_PRODUCTS = """
import os, sys
here = os.environ.get("SSH_CONNECTION", "").split()[2:3] == [{address!r}]
if here and "hvdrecover.doctor.matrix_products" in sys.orig_argv:
    import numpy
    multiply = numpy.matmul
    def matmul(first, second, out):
        multiply(first, second, out=out)
        out.view(numpy.uint8).reshape(-1)[4096] ^= 1
    numpy.matmul = matmul
"""


def doctor(lab: Lab, *words: str, environ: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Exit code and the findings of each check."""
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
    # There may be no GPU, and they share the processors of a machine that runs other tests.
    assert (code, [finding for finding in wrong if finding["check"] not in ("gpus", "compute")]) == (0, [])
    processors = [each for host in found["compute"][0]["facts"]["hosts"].values() for each in host]
    assert len(processors) == 3 * len(os.sched_getaffinity(0))
    assert {each["wrong"] for each in processors} == {0}
    assert len({bits for each in processors for bits in each["bits"]}) == 1
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
    faults = (WRONG_CLOCK + WRONG_PRODUCTS).format(address=second.address)
    (tmp_path / "sitecustomize.py").write_text(faults)
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
    (products,) = [each for each in found["compute"] if each["outcome"] == "failure"]
    assert products["at_fault"] == [second.name]
    assert products["what"].startswith(f"computed wrongly: {second.name}: CPU ")
    (shared,) = found["root: shared"]
    assert (shared["outcome"], shared["facts"]["hosts"]) == ("warning", {second.name: False})
    assert shared["facts"]["writer"] == first.name


@LONG  # half a minute
def test_a_job_starts_without_a_host_that_computes_wrongly(lab: Lab, start: Start, tmp_path: Path) -> None:
    first, second, third = lab.hosts
    (tmp_path / "sitecustomize.py").write_text(WRONG_PRODUCTS.format(address=second.address))
    run = FaultyRun(tmp_path / "run", "torch", (), 1, "--step-seconds", "0")
    command = [sys.executable, "-m", "hvdrecover", "run", "--preflight", "-np", "3", "--min-np", "2"]
    command += ["-H", ",".join(f"{name}:1" for name in names(lab)), "--network-interface", INTERFACE]
    command += ["-i", os.fspath(lab.key), "--no-standby", "--"]
    environ = {**run.faults, **SLOW_HOSTS, "PYTHONPATH": str(tmp_path)}
    job = start(run, first.command(command), environ)
    run.finish(job)
    assert {batch.size for batch in run.batches()} == {2}
    (event,) = run.events("preflight")
    assert event["used"] == [first.name, third.name]
    assert f"computed wrongly: {second.name}: CPU " in event["excluded"][second.name]
