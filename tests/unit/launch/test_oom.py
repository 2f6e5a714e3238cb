from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.launch import processes


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's words, from files of ours."""

    def instead(path: str) -> Path:
        return tmp_path / path.lstrip("/")

    monkeypatch.setattr(processes, "Path", instead)
    monkeypatch.setattr(processes, "_CGROUPS", instead("/sys/fs/cgroup"))
    return tmp_path


def say(kernel: Path, path: str, text: str) -> None:
    (kernel / path).parent.mkdir(parents=True, exist_ok=True)
    (kernel / path).write_text(text)


def test_kills_in_the_cgroup_are_counted(kernel: Path) -> None:
    say(kernel, "proc/self/cgroup", "0::/jobs/job7\n")
    say(
        kernel,
        "sys/fs/cgroup/jobs/job7/memory.events",
        "low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
    )
    say(kernel, "sys/fs/cgroup/memory.events", "oom_kill 99\n")
    assert processes.memory_kills() == 2


def test_kills_on_the_host_are_counted(kernel: Path) -> None:
    say(kernel, "proc/vmstat", "pgfault 70\noom_kill 5\nnuma_hit 3\n")
    assert processes.memory_kills() == 5
