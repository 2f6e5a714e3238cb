"""Matrix products on the processors of this machine, as they are, and with faults in them."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdrecover.checkpoint.digest import digest
from hvdrecover.doctor import compute, matrix_products
from hvdrecover.doctor.findings import Finding
from hvdrecover.errors import LaunchError

Devices = list[dict[str, Any]]
CPUS = sorted(os.sched_getaffinity(0))

# Python runs a module of this name at its start. Numpy's products on the last CPU are not what they were.
FAULTY = """
import os, signal
import numpy
right = numpy.matmul
def faulty(first, second, out):
    right(first, second, out=out)
    if os.sched_getaffinity(0) == {{{cpu}}}:
        {fault}
numpy.matmul = faulty
"""
FLIP = "out.view(numpy.uint8).reshape(-1)[4096] ^= 1  # the lowest bit of one number"
DIE = "os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture(scope="module")
def well() -> Devices:
    """Return the products of this machine as it is."""
    return matrix_products.run("cpus")


def judged(**hosts: Devices) -> list[Finding]:
    """Return what is wrong with hosts, but for their being busy."""
    return [each for each in compute.judge(hosts) if each.outcome == "failure"]


def faulty(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Return the products of this machine with a fault."""
    (folder / "sitecustomize.py").write_text(FAULTY.format(cpu=CPUS[-1], fault=fault))
    monkeypatch.setenv("PYTHONPATH", os.fspath(folder))
    return matrix_products.run("cpus")


def test_the_digest_of_the_product_of_whole_numbers() -> None:
    first, second = matrix_products.whole_numbers()
    product = first @ second  # of int64, in which nothing is rounded, nor goes beyond 2**52
    assert abs(first).max() <= 2**22 and abs(second).max() <= 2**22 and len(first) == 256
    assert digest(product.astype(np.float64)) == matrix_products.WHOLE


def test_all_processors_of_this_machine_compute_right_and_alike(well: Devices) -> None:
    assert [each["device"] for each in well] == [f"CPU {number}" for number in CPUS]
    assert {each["wrong"] for each in well} == {0}
    assert len({bits for each in well for bits in each["bits"]}) == 1
    assert all(each["products"] == sum(each["bits"].values()) >= 3 for each in well)
    assert judged(h1=well, h2=well) == []
    json.dumps(well)


def test_a_processor_that_gets_a_bit_wrong_is_named(
    well: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judged(h1=well, h2=faulty(tmp_path, FLIP, monkeypatch))
    assert [each.at_fault for each in found] == [("h2",)]
    assert f"h2: CPU {CPUS[-1]} (" in found[0].what


def test_a_processor_that_can_not_do_an_instruction_is_named(
    well: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = judged(h1=well, h2=faulty(tmp_path, DIE, monkeypatch))
    assert re.fullmatch(rf"computed wrongly: h2: CPU {CPUS[-1]} \(.* SIGILL\)", found.what)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="OPENBLAS_CORETYPE names processors of x86")
def test_a_host_whose_library_takes_other_code_is_named(
    well: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")  # of 2004: other sums, in several times the time
    other = matrix_products.run("cpus")
    if other[0]["bits"].keys() == well[0]["bits"].keys():
        pytest.skip("this numpy has another library, or this processor is as old")
    found = judged(h1=well, h2=other, h3=well)
    assert {each.at_fault for each in found} == {("h2",)}
    assert found[0].what.startswith("other bits than most processors of their kind: h2: CPU 0")


@pytest.fixture
def busy() -> Iterator[None]:
    """Something else keeps each CPU busy."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen([*command]) for _ in CPUS]
    for each, number in zip(spinning, CPUS, strict=True):
        os.sched_setaffinity(each.pid, {number})
    yield
    for each in spinning:
        each.kill()
        each.wait()


def test_a_host_that_is_busy_with_something_else_is_named(well: Devices, busy: None) -> None:
    # Its products get a small share of the time, as if much more were running there.
    command = ["nice", "-n", "10", sys.executable, "-m", "hvdrecover.doctor.matrix_products", "cpus"]
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    slowed = json.loads(subprocess.check_output(command, env=environ, timeout=300))
    last = compute.judge({"h1": well, "h2": slowed})[-1]
    assert (last.outcome, last.at_fault) == ("warning", ())
    assert "something else takes the time of their CPUs" in last.what and "h2: a job would get" in last.what
    assert judged(h1=well, h2=slowed) == []  # it is not broken


def test_a_process_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('libopenblas is gone')")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with pytest.raises(LaunchError, match="products on cpus: ImportError: libopenblas is gone"):
        matrix_products.run("cpus")


def test_nothing_is_left_of_one_that_is_killed() -> None:
    command = [sys.executable, "-m", "hvdrecover.doctor.matrix_products", "cpus"]
    environ = {**os.environ, "HVDTEST_PRODUCTS": str(os.getpid())}
    process = subprocess.Popen(command, env=environ)
    while len(matrix_products.processes.marked(f"HVDTEST_PRODUCTS={os.getpid()}")) < 1 + len(CPUS):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    while matrix_products.processes.marked(f"HVDTEST_PRODUCTS={os.getpid()}"):
        pass  # the test's time limit ends this


def test_a_device_of_torch_multiplies_the_same_whole_numbers() -> None:
    torch = pytest.importorskip("torch")
    found = matrix_products.measure(
        matrix_products.on_torch("GPU 0", "some GPU", torch, "cpu", size=64), seconds=0.0
    )
    assert (found["wrong"], found["products"], len(found["bits"])) == (0, 3, 1)
