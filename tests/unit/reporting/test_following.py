"""Following event files: what was appended is read, once and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdrecover.reporting import following
from hvdrecover.reporting.following import Follower


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "events"


@pytest.fixture
def follower(folder):
    return Follower(folder)


def line(number):
    return json.dumps({"time": number, "kind": "commit", "host": "a", "rank": 0}).encode() + b"\n"


def append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def times(lines):
    """The times of events; None for a line that is none."""
    return [None if event is None else event.time for _, event in lines]


def test_each_line_is_seen_once(folder, follower):
    assert follower.look() == []
    for number in range(3):
        append(folder / "a-1.jsonl", line(number))
        assert times(follower.look()) == [number]
        assert times(follower.look()) == []
    assert (follower.behind, follower.files) == (False, 1)


def test_a_half_written_line_is_kept_for_later(folder, follower):
    written = line(1) + line(2)
    for place in range(len(written)):
        append(folder / "a-1.jsonl", written[place : place + 1])
        seen = times(follower.look())
        assert seen == {len(line(1)) - 1: [1], len(written) - 1: [2]}.get(place, [])


def test_new_files_are_found_also_in_folders_below(folder, follower):
    append(folder / "a-1.jsonl", line(1))
    assert times(follower.look()) == [1]
    append(folder / "b-1.jsonl", line(2))
    append(folder / "below" / "c-1.jsonl", line(3))
    append(folder / "stacks-a-1.txt", b"text\n")
    assert sorted(times(follower.look())) == [2, 3]
    append(folder / "a-1.jsonl", line(4))  # of a later process with the same id
    assert times(follower.look()) == [4]
    assert follower.files == 3


@pytest.mark.parametrize(
    "garbage", [b"\n", b"null\n", b"\xff\xfe\n", b'{"time": 1, "ki{"time": 2}\n', b"[" * 99_999 + b"\n"]
)
def test_lines_that_are_no_events_are_told_as_such(folder, follower, garbage):
    append(folder / "a-1.jsonl", line(1) + garbage + line(2))
    assert times(follower.look()) == [1, None, 2]


def test_only_what_is_new_is_read(folder, follower):
    """Files that have been read may be gone: of what is there only the end is looked at."""
    append(folder / "a-1.jsonl", line(1) * 1000)
    assert len(follower.look()) == 1000
    with (folder / "a-1.jsonl").open("r+b") as file:
        file.write(b"x" * (len(line(1)) * 1000))
    append(folder / "a-1.jsonl", line(2))
    assert times(follower.look()) == [2]


def test_a_file_that_is_copied_anew_is_read_on_from_where_it_was(folder, follower):
    path = folder / "a-1.jsonl"
    append(path, line(1) + line(2))
    follower.look()
    path.write_bytes(line(1))
    assert times(follower.look()) == []
    path.unlink()
    assert times(follower.look()) == []
    append(path, line(1) + line(2) + line(3))
    assert times(follower.look()) == [3]


def test_a_look_at_much_ends_and_says_so(folder, follower, monkeypatch):
    monkeypatch.setattr(following, "_PIECE", 256)
    monkeypatch.setattr(following, "_BUDGET", 512)
    for name in "ab":
        append(folder / f"{name}-1.jsonl", b"".join(line(number) for number in range(50)))
    looks = [follower.look()]
    while follower.behind:
        looks.append(follower.look())
    assert max(map(len, looks)) < 20
    for name in "ab":
        assert [event.time for look in looks for file, event in look if f"{name}-1" in file] == list(
            range(50)
        )


@pytest.mark.parametrize("length", [255, 256, 257, 600, 1024])
@pytest.mark.parametrize("chunk", [100, 10_000])
def test_a_line_that_is_too_long_is_passed_over_as_one(folder, follower, monkeypatch, length, chunk):
    monkeypatch.setattr(following, "_PIECE", 256)
    data = line(1) + b"x" * length + b"\n" + line(2)
    seen = []
    for place in range(0, len(data), chunk):
        append(folder / "a-1.jsonl", data[place : place + chunk])
        seen += times(follower.look())
    assert seen == [1, None, 2]


def test_what_can_t_be_read_is_named_and_hides_nothing_else(folder, follower):
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}-1.jsonl").symlink_to("missing.jsonl")
    append(folder / "g-1.jsonl", line(1))
    assert times(follower.look()) == [1]
    assert "-1.jsonl" in follower.problem
    for name in "abcdef":
        (folder / f"{name}-1.jsonl").unlink()
    assert times(follower.look()) == []
    assert follower.problem == ""
