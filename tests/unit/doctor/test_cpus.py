"""The kind of processors, and how many of them cgroups leave; from files such as those of /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdrecover.doctor import cpus

X86 = """\
processor\t: 0
model name\t: AMD EPYC 9575F
cpu family\t: 26
model\t\t: 2
flags\t\t: fpu sse sse4_2 avx2 fma avx512f
processor\t: 1
model name\t: AMD EPYC 9575F
"""
ARM = """\
processor\t: 0
CPU implementer\t: 0x41
Features\t: fp asimd sve bf16
CPU part\t: 0xd4f
"""


def test_processors_of_one_kind_are_of_one_model_with_the_same_instructions(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text(X86)
    (tmp_path / "arm").write_text(ARM)
    (tmp_path / "masked").write_text(X86.replace(" avx512f", ""))
    (tmp_path / "kernel").write_text(X86.replace("fpu", "fpu brand_new_flag"))
    assert cpus.kind(tmp_path / "x86") == "AMD EPYC 9575F 26 2 avx2 avx512f fma sse4_2"
    assert cpus.kind(tmp_path / "arm") == "0x41 0xd4f asimd bf16 sve"
    assert cpus.kind(tmp_path / "masked") != cpus.kind(tmp_path / "x86")
    assert cpus.kind(tmp_path / "kernel") == cpus.kind(tmp_path / "x86")
    assert cpus.kind()


def test_a_machine_that_tells_nothing_is_of_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("")
    assert cpus.kind(tmp_path / "cpuinfo") == os.uname().machine


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path / "proc"


def test_the_least_of_what_cgroups_of_version_2_leave(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/pods/pod7\n")
    (tmp_path / "pods" / "pod7").mkdir(parents=True)
    (tmp_path / "pods" / "pod7" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pods" / "cpu.max").write_text("150000 100000\n")
    assert cpus.share(proc, tmp_path) == 1.5
    assert cpus.to_use(proc, tmp_path) == ([None] if len(os.sched_getaffinity(0)) > 1 else [0])


def test_what_cgroups_of_version_1_leave(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/job\n2:memory:/other\n")
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpus.share(proc, tmp_path) is None
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("25000\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpus.share(proc, tmp_path) == 0.25


def test_without_a_limit_all_processors_that_this_process_may_run_on(proc: Path, tmp_path: Path) -> None:
    assert cpus.to_use(proc, tmp_path) == sorted(os.sched_getaffinity(0))
