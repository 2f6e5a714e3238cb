from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover.launch import processes
from tests.unit.launch import children
from tests.unit.launch.children import child, environment, gone, is_alive, line, until

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]
STARTS_ANOTHER = f"""
import os, signal, sys
from hvdrecover.launch import processes
other = processes.start({SLEEP}, os.environ, stdout=-1, new_session=sys.argv[1] == "session")
other.stdout.readline()
print(other.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("apart", ["group", "session"])
def test_what_was_started_dies_with_a_parent_that_is_killed(apart: str) -> None:
    with child(STARTS_ANOTHER, apart) as parent:
        other = int(line(parent))
        assert is_alive(other)
        parent.kill()
        gone(other)


def test_what_is_started_gets_what_it_is_given_and_nothing_else() -> None:
    read, write = os.pipe()
    other = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(other, True)
    code = f"import os; os.write({write}, repr(sorted(os.environ.items())).encode()); os.fstat({other})"
    try:
        started = processes.start(
            [sys.executable, "-c", code],
            {"ONLY": "this", "LC_CTYPE": "C.UTF-8"},
            hand_down=[write],
            stderr=subprocess.PIPE,
        )
        _, errors = started.communicate(timeout=60)
        os.set_blocking(read, False)
        assert os.read(read, 4096) == b"[('LC_CTYPE', 'C.UTF-8'), ('ONLY', 'this')]"
        assert b"Bad file descriptor" in errors
    finally:
        for descriptor in (read, write, other):
            os.close(descriptor)


@pytest.mark.parametrize("leader_dies_first", [False, True])
def test_a_group_is_killed_with_its_first_process_or_without(leader_dies_first: bool) -> None:
    code = f"""
import signal, subprocess
other = subprocess.Popen({SLEEP}, stdout=subprocess.PIPE)
other.stdout.readline()
print(other.pid, flush=True)
signal.pause()
"""
    started = processes.start([sys.executable, "-c", code], environment(), stdout=subprocess.PIPE)
    assert started.stdout is not None
    member = int(started.stdout.readline())
    if leader_dies_first:
        processes.kill(started.pid)
        until(lambda: started.poll() is not None, "its end")
        assert is_alive(member)
    started.kill_group()
    gone(member)
    assert started.wait() == -signal.SIGKILL
    started.stdout.close()


def test_processes_are_found_and_killed_by_their_mark() -> None:
    code = f"""
import subprocess
others = [subprocess.Popen({SLEEP}, start_new_session=True, stdout=subprocess.PIPE) for _ in range(2)]
for other in others:
    other.stdout.readline()
print(*[other.pid for other in others], flush=True)
others[0].kill()
import signal; signal.pause()  # without waiting for the one that was killed: a zombie
"""
    mark = f"HVDRECOVER_TEST={os.getpid()}"
    near = f"{mark}0"
    with (
        child(code, env={**environment(), "HVDRECOVER_TEST": mark.partition("=")[2]}) as marked,
        child(SLEEP[2], env={**environment(), "HVDRECOVER_TEST": near.partition("=")[2]}) as spared,
    ):
        line(spared)
        zombie, other = map(int, line(marked).split())
        until(lambda: children.state(zombie) == "Z", "a zombie")
        assert sorted(processes.marked(mark)) == sorted([marked.pid, other])
        assert processes.marked(near) == [spared.pid]
        processes.kill_marked(mark)
        assert not is_alive(other)
        assert processes.marked(mark) == []
        assert marked.wait() == -signal.SIGKILL
        assert spared.poll() is None


def test_what_was_killed_leaves_nothing_in_shared_memory() -> None:
    code = """
import multiprocessing, signal
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
signal.pause()
"""
    mark = f"HVDRECOVER_TEST={os.getpid()}.shared"
    with child(code, env={**environment(), "HVDRECOVER_TEST": mark.partition("=")[2]}) as marked:
        file = Path("/dev/shm") / f"sem.{line(marked).strip().removeprefix('/')}"
        assert file.exists()
        processes.kill_marked(mark)
        assert not file.exists()
        assert marked.wait() == -signal.SIGKILL


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


def test_kills_in_the_cgroup_or_on_the_host_are_counted(kernel: Path) -> None:
    say(kernel, "proc/self/cgroup", "0::/jobs/job7\n")
    counts = "low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
    say(kernel, "sys/fs/cgroup/jobs/job7/memory.events", counts)
    say(kernel, "sys/fs/cgroup/memory.events", "oom_kill 99\n")
    assert processes.memory_kills() == 2
    say(kernel, "proc/vmstat", "pgfault 70\noom_kill 5\nnuma_hit 3\n")
    assert processes.memory_kills() == 5
