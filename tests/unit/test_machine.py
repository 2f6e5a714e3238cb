"""The machine: its versions and addresses, its memory, and its processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover import machine
from hvdrecover.machine import Available, available_memory, has_ended, identity, is_local, source_towards


def test_a_name_server_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(machine, "_RESOLVING", 0.05)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: gate.wait())
    assert not is_local("node-7")
    assert source_towards("node-7") == ""
    assert is_local("localhost")  # which needs no name server
    gate.set()


@pytest.fixture
def system(tmp_path: Path) -> Path:
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


def found(system: Path) -> Available:
    return available_memory(system / "proc", system / "cgroup")


def test_without_a_limit_it_is_what_the_kernel_says(system: Path) -> None:
    assert found(system) == Available(8_192_000, False)
    limit(system / "cgroup" / "job" / "rank", "max", 100, 0)
    assert found(system) == Available(8_192_000, False)
    (system / "proc" / "self" / "cgroup").unlink()
    assert found(system) == Available(8_192_000, False)


def test_the_tightest_limit_counts_whichever_cgroup_above_has_it(system: Path) -> None:
    limit(system / "cgroup" / "job" / "rank", "5000", 1000, 0)
    assert found(system) == Available(4000, True)
    limit(system / "cgroup" / "job", "4500", 4200, 200)  # cached files can be dropped
    assert found(system) == Available(500, True)
    limit(system / "cgroup" / "job", "4500", 4200, 200, used_lately=50)  # so can those
    assert found(system) == Available(550, True)
    limit(system / "cgroup" / "job", "4500", 4700, 0)
    assert found(system) == Available(0, True)


def test_cgroups_of_version_1(system: Path) -> None:
    (system / "proc" / "self" / "cgroup").write_text("5:cpu,memory.not:/x\n4:memory:/job\n0::/\n")
    folder = system / "cgroup" / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("5000\n")
    (folder / "memory.usage_in_bytes").write_text("2000\n")
    (folder / "memory.stat").write_text("cache 1\ntotal_inactive_file 300\ntotal_active_file 40\n")
    assert found(system) == Available(3340, True)


def test_a_process_has_ended_when_it_has() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    said = identity(child.pid)
    assert not has_ended(said)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked for its exit code yet
    assert has_ended(said)
    child.communicate()
    assert has_ended(said)


def test_a_process_that_cannot_be_seen_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other users' processes where /proc is mounted with hidepid."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    said = identity(child.pid)

    def hidden(number: int) -> None:
        raise FileNotFoundError(f"/proc/{number}/stat")

    monkeypatch.setattr(machine, "_seen", hidden)
    assert not has_ended(said)
    child.communicate()
    assert has_ended(said)


def test_a_process_with_the_number_of_one_that_has_ended_is_another_process() -> None:
    place, _, start = identity().rpartition(" ")
    assert has_ended(f"{place} {int(start) - 1}")


@pytest.mark.parametrize(
    "changes",
    [{0: "host-b"}, {1: "0-0"}, {2: "pid:[1]"}, {3: "x"}],
    ids=str,
)
def test_a_process_that_is_not_known_here_has_not_ended(changes: dict[int, str]) -> None:
    words = {**dict(enumerate(identity().split())), 3: str(1 << 40), **changes}  # no process has this number
    assert not has_ended(" ".join(words.values()))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end, so that no thread is left."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_call_that_is_late_fails_those_after_it_until_it_has_ended(gate: threading.Event) -> None:
    bounded = machine.Bounded(0.05)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        bounded(gate.wait)
    with pytest.raises(TimeoutError, match="has still not returned"):
        bounded(int, "1")
    gate.set()
    assert bounded._last is not None and bounded._last.result(60)
    assert bounded(int, "1") == 1


def test_calls_of_several_threads_do_not_count_each_other_as_late(gate: threading.Event) -> None:
    bounded, found = machine.Bounded(60.0), []
    first = threading.Thread(target=lambda: found.append(bounded(gate.wait)))
    first.start()
    second = threading.Thread(target=lambda: found.append(bounded(int, "1")))
    second.start()
    gate.set()
    first.join(60)
    second.join(60)
    assert sorted(found) == [1, True]
