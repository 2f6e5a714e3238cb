"""Finding a run's event files, and taking them apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.events import Events
from hvdrecover.reporting import reading
from tests.fakes.clock import FakeClock
from tests.unit.reporting.runs import TWO, Run


def test_what_our_own_log_writes_is_read(tmp_path):
    log = Events(tmp_path, "node-7", FakeClock(start=50.0))
    log.rank = 3
    log.emit("fault", fault="crash", slot=1)
    log.emit("sync", source="memory", generation=2, commit=7, size=4, seconds=0.1)
    log.emit("commit", generation=2, commit=8)
    found = reading.read(tmp_path)
    (fault,), (stint,) = found.of("fault"), found.stints
    assert (fault.time, fault.host, fault.rank, fault.word("fault"), fault.whole("slot")) == (
        50.0,
        "node-7",
        3,
        "crash",
        1,
    )
    assert (stint.place, list(stint.numbers), list(stint.times)) == ((2, 7, 4), [8], [50.0])
    assert (dict(found.spans), found.files, found.passed_over) == ({"node-7": (50.0, 50.0)}, 1, 0)


@pytest.mark.parametrize(
    "line",
    [
        b'{"time": 5.0, "kind": "fau',
        b"",
        b"[1, 2]",
        b"null",
        b'{"kind": "fault", "host": "a"}',
        b'{"time": "now", "kind": "fault", "host": "a"}',
        b'{"time": NaN, "kind": "fault", "host": "a"}',
        b'{"time": 1e300, "kind": "fault", "host": "a"}',
        b'{"time": 1e15, "kind": "fault", "host": "a"}',
        b'{"time": -1, "kind": "fault", "host": "a"}',
        b'{"time": ' + b"9" * 400 + b', "kind": "fault", "host": "a"}',
        b'{"time": 5, "kind": 1, "host": "a"}',
        b'{"time": 5, "kind": "fault", "host": null}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_lines_that_are_no_events_are_passed_over(tmp_path, line):
    run = Run(tmp_path)
    run.report(1, "start", pid=5, attempt=1)
    with (tmp_path / "node-1-5.jsonl").open("ab") as file:
        file.write(line + b"\n")
    run.report(2, "end", pid=5, code=0, reason="")
    found = reading.read(tmp_path)
    assert ([event.kind for event in found.events], found.passed_over) == (["start", "end"], 1)


def test_facts_of_another_type_are_unknown(tmp_path):
    run = Run(tmp_path)
    run.fault(1, steps="many", exit=True, detail=None, silent=float("inf"), slot=1.5)
    run.rendezvous(2, TWO, 1, 0)
    run.report(3, "commit", *TWO[0], generation=1, commit=1 << 70)
    found = reading.read(tmp_path)
    (fault,) = found.of("fault")
    assert [fault.whole(name) for name in ("steps", "exit", "slot")] == [None] * 3
    assert (fault.word("detail"), fault.number("silent")) == ("", None)
    assert [len(stint.numbers) for stint in found.stints] == [0, 0]


def test_files_below_the_folder_are_read_too(tmp_path):
    for host in ("a", "b"):
        Run(tmp_path / host).report(1, "start", host)
    assert (len(reading.read(tmp_path).events), reading.read(tmp_path).files) == (2, 2)


@pytest.mark.parametrize("content", [None, b"", b"nonsense\n"])
def test_a_folder_without_events_is_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^FOLDER: '{tmp_path}' .*\.jsonl .*HVDRECOVER_EVENTS"):
        reading.read(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(ConfigError, match=rf"^FOLDER: '{tmp_path}' .*: .*x\.jsonl"):
        reading.read(tmp_path)


def written(folder: Path, time: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "a-1.jsonl").write_text("{}\n")
    os.utime(folder / "a-1.jsonl", (time, time))
    return folder


def test_the_folder_that_was_asked_for_comes_first(tmp_path):
    asked, configured = written(tmp_path / "asked", 1), written(tmp_path / "configured", 2)
    newest = written(tmp_path / "runs" / "newest", 3)
    assert reading.locate(asked, configured, newest.parent) == asked
    assert reading.locate(None, configured, newest.parent) == configured
    assert reading.locate(None, None, newest.parent) == newest


def test_the_newest_run_is_the_one_that_was_written_to_last(tmp_path):
    newest = written(tmp_path / "b", 30)
    written(tmp_path / "a", 10)
    written(tmp_path / "c", 20)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert reading.locate(None, None, tmp_path) == newest


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_that_is_none_is_an_error_that_names_where_it_comes_from(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"^FOLDER: '.*{name}' "):
        reading.locate(tmp_path / name, None, tmp_path)
    with pytest.raises(ConfigError, match=f"^HVDRECOVER_EVENTS: '.*{name}' "):
        reading.locate(None, tmp_path / name, tmp_path)


@pytest.mark.parametrize("there", [False, True])
def test_without_any_run_there_is_nothing_to_report_on(tmp_path, there):
    runs = tmp_path / "runs"
    if there:
        (runs / "empty").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"^FOLDER: .*HVDRECOVER_EVENTS .*'{runs}' "):
        reading.locate(None, None, runs)
