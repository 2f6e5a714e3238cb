"""Memory that processes can still allocate, with and without cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.host_memory import Available, available, left


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 8,000 kB that processes can have."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job/rank\n")
    (tmp_path / "cgroup" / "job" / "rank").mkdir(parents=True)
    return tmp_path


def limit(folder: Path, most: str, used: int, cached: int, used_lately: int = 0) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file {used_lately}\n")


def found(machine: Path) -> Available:
    return available(machine / "proc", machine / "cgroup")


def test_without_a_limit_it_is_what_the_kernel_says(machine: Path) -> None:
    assert found(machine) == Available(8_192_000, False)
    limit(machine / "cgroup" / "job" / "rank", "max", 100, 0)
    assert found(machine) == Available(8_192_000, False)
    (machine / "proc" / "self" / "cgroup").unlink()
    assert found(machine) == Available(8_192_000, False)


def test_the_tightest_limit_counts_whichever_cgroup_above_has_it(machine: Path) -> None:
    limit(machine / "cgroup" / "job" / "rank", "5000", 1000, 0)
    assert found(machine) == Available(4000, True)
    limit(machine / "cgroup" / "job", "4500", 4200, 200)  # cached files can be dropped
    assert found(machine) == Available(500, True)
    limit(machine / "cgroup" / "job", "4500", 4200, 200, used_lately=50)  # so can those
    assert found(machine) == Available(550, True)
    limit(machine / "cgroup" / "job", "4500", 4700, 0)
    assert found(machine) == Available(0, True)


def test_cgroups_of_version_1(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("5:cpu,memory.not:/x\n4:memory:/job\n0::/\n")
    folder = machine / "cgroup" / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("5000\n")
    (folder / "memory.usage_in_bytes").write_text("2000\n")
    (folder / "memory.stat").write_text("cache 1\ntotal_inactive_file 300\ntotal_active_file 40\n")
    assert found(machine) == Available(3340, True)


def test_swap_is_not_beyond_the_limit_of_a_cgroup(machine: Path) -> None:
    with (machine / "proc" / "meminfo").open("a") as file:
        file.write("SwapFree: 500 kB\n")
    assert left(machine / "proc", machine / "cgroup") == Available(8_192_000 + 512_000, False)
    limit(machine / "cgroup" / "job", "8300000", 0, 0)  # more than the host has without swap
    assert left(machine / "proc", machine / "cgroup") == Available(8_300_000, True)
