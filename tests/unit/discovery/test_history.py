"""The history that calls keep for each other."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from hvdrecover.discovery.health import Health
from hvdrecover.discovery.history import History, HistoryFile
from hvdrecover.discovery.hosts import Host

FULL = History(
    hosts=(Host("a", 2), Host("b")),
    listed=10.5,
    asked=11.5,
    failure="it is away",
    empty=True,
    first_seen={"a": 1.0, "b": 2.0},
    health={"a": Health(True, 1.0, 2.0), "b": Health(False, 1.0, 2.0, 1, "port 22: refused")},
    healthy=("a",),
    healthy_at=2.0,
)


@pytest.mark.parametrize("history", [History(), FULL])
def test_it_is_read_as_it_was_written(history: History, tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "history.json")
    assert file.read() == History()
    file.write(history)
    assert file.read() == history
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b'{"format": 2}x',
        b'{"format": 3, "x": 1}',
        b'{"format": 2, "odd": 1}',
        b'{"format": 2, "hosts": [{"name": 1, "color": 2}], "health": {}, "healthy": []}',
    ],
)
def test_what_is_none_of_ours_is_forgotten(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(text)
    assert HistoryFile(path).read() == History()


def count_up(path: Path, times: int) -> None:
    file = HistoryFile(path)
    for _ in range(times):
        with file.lock(wait=True):
            file.write(History(listed=(file.read().listed or 0.0) + 1))


def test_many_may_use_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=count_up, args=(path, 200)) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            json.loads(path.read_bytes())  # never half a file
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert HistoryFile(path).read().listed == 600


def test_a_lock_that_is_held_is_not_waited_for_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    with HistoryFile(path).lock(wait=True), pytest.raises(BlockingIOError):
        with HistoryFile(path).lock(wait=False):
            pass
    with HistoryFile(path).lock(wait=False):
        pass


def test_files_that_nobody_writes_any_more_are_removed_and_no_others(tmp_path: Path) -> None:
    """The folder may be one that the user keeps other files in."""
    old, new = (HistoryFile(tmp_path / f"{digit * 16}.json") for digit in "01")
    for file in (old, new):
        with file.lock(wait=True):
            file.write(FULL)
    for name in ("model_config.json", f"{'2' * 16}.json"):
        (tmp_path / name).write_text("{}")
    for path in tmp_path.iterdir():
        if not path.name.startswith("1"):
            os.utime(path, (1.0, 1.0))
    new.forget_others(time.time())
    left = {"1" * 16 + ".json", "1" * 16 + ".json.lock", "2" * 16 + ".json", "model_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == left
