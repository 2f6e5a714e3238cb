"""What calls remember for each other."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from hvdrecover.discovery.health import Health
from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.memory import Memory, MemoryFile

FULL = Memory(
    hosts=(Host("a", 2), Host("b")),
    listed=10.5,
    asked=11.5,
    failure="it is away",
    empty=True,
    first_seen={"a": 1.0, "b": 2.0},
    health={"a": Health(True, 1.0, 2.0), "b": Health(False, 1.0, 2.0, 1, "port 22: refused")},
    well=("a",),
    well_at=2.0,
)


@pytest.mark.parametrize("memory", [Memory(), FULL])
def test_it_is_read_as_it_was_written(memory: Memory, tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "memory.json")
    assert file.read() == Memory()
    file.write(memory)
    assert file.read() == memory
    assert [path.name for path in tmp_path.iterdir()] == ["memory.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b'{"format": 1}x',
        b'{"format": 2, "x": 1}',
        b'{"format": 1, "odd": 1}',
        b'{"format": 1, "hosts": [{"name": 1, "color": 2}], "health": {}, "well": []}',
    ],
)
def test_what_is_none_of_ours_is_forgotten(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    path.write_bytes(text)
    assert MemoryFile(path).read() == Memory()


def count_up(path: Path, times: int) -> None:
    file = MemoryFile(path)
    for _ in range(times):
        with file.lock(wait=True):
            file.write(Memory(listed=(file.read().listed or 0.0) + 1))


def test_many_may_use_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "memory.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=count_up, args=(path, 200)) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            json.loads(path.read_bytes())  # never half a file
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert MemoryFile(path).read().listed == 600


def test_a_lock_that_is_held_is_not_waited_for_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    with MemoryFile(path).lock(wait=True), pytest.raises(BlockingIOError):
        with MemoryFile(path).lock(wait=False):
            pass
    with MemoryFile(path).lock(wait=False):
        pass


def test_files_that_nobody_writes_any_more_are_removed(tmp_path: Path) -> None:
    old, new = MemoryFile(tmp_path / "old.json"), MemoryFile(tmp_path / "new.json")
    for file in (old, new):
        with file.lock(wait=True):
            file.write(FULL)
    os.utime(tmp_path / "old.json", (1.0, 1.0))
    new.forget_others(time.time())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.json", "new.json.lock"]
