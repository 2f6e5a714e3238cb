import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.record import FILE, Follower, Record, locate, read


def event(kind="commit", time=1.0, **facts):
    return {"time": time, "kind": kind, "host": "h", "pid": 7, "rank": 0, **facts}


def kinds(events):
    return [each.kind for each in events]


def test_a_record_has_a_schema_and_one_event_a_line(tmp_path):
    folder = tmp_path / "new" / "folder"
    Record(folder).add(event(commit=3))
    lines = (folder / FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"schema": 1}, event(commit=3)]
    (found,) = read(folder)
    assert (found.time, found.kind, found.host, found.pid, found.rank) == (1.0, "commit", "h", 7, 0)
    assert found.whole("commit") == 3


def test_processes_that_write_at_once_mix_no_lines(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom hvdrecover.record import Record\n"
        "record = Record(Path(sys.argv[1]))\n"
        "for number in range(300):\n"
        "    record.add({'time': 1.0, 'kind': 'commit', 'host': sys.argv[2], 'text': 'x' * number})\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    writers = [subprocess.Popen([*words, name]) for name in ("a", "b", "c")]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(read(tmp_path)) == 900
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_line_that_its_writer_could_not_finish_costs_only_that_line(tmp_path):
    Record(tmp_path).add(event("start"))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1.0, "kind": "com')
    assert kinds(read(tmp_path)) == ["start"]
    Record(tmp_path).add(event("end"))
    assert kinds(read(tmp_path)) == ["start", "end"]


class Unprintable:
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize("fact", [Unprintable(), {(1, 2): 3}, Path("/x"), float("nan"), b"\xff", "\ud800"])
def test_no_fact_makes_add_raise_or_ends_the_record(tmp_path, fact):
    record = Record(tmp_path)
    record.add(event("odd", fact=fact))
    record.add(event("next"))
    assert kinds(read(tmp_path))[-1] == "next"


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    record = Record(tmp_path / "file" / "events")
    with caplog.at_level(logging.WARNING, "hvdrecover"):
        record.add(event())
        record.add(event())
    assert len([message for message in caplog.messages if "events may be missing" in message]) == 1


def test_a_disk_that_hangs_costs_events_and_one_line(tmp_path, caplog):
    os.mkfifo(tmp_path / FILE)  # opening it blocks, as no process reads it
    record = Record(tmp_path, seconds=0.2)
    with caplog.at_level(logging.WARNING, "hvdrecover"):
        record.add(event("waits"))
        record.add(event("left-out"))
    assert len([message for message in caplog.messages if "events may be missing" in message]) == 1
    os.close(os.open(tmp_path / FILE, os.O_RDONLY))  # frees the thread that waits


def test_what_is_appended_is_read_as_it_comes(tmp_path):
    follower = Follower(tmp_path)
    assert follower.look() == []
    record = Record(tmp_path)
    record.add(event("start"))
    assert kinds(follower.look()) == ["start"]
    record.add(event("commit"))
    with (tmp_path / FILE).open("a") as file:
        file.write(json.dumps(event("end")))
    assert kinds(follower.look()) == ["commit"]
    with (tmp_path / FILE).open("a") as file:
        file.write("\n")
    assert kinds(follower.look()) == ["end"]
    assert follower.look() == []


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    Record(tmp_path).add(event())
    odd = [[], 3, {"kind": "x"}, event(time="now"), event(time=1e300), {**event(), "host": None}]
    with (tmp_path / FILE).open("a") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in odd)
        file.write("[" * 100_000 + "\n")
    assert len(read(tmp_path)) == 1


def test_the_newest_run_is_found(tmp_path):
    for number, name in enumerate(["first", "second"]):
        Record(tmp_path / name).add(event())
        os.utime(tmp_path / name / FILE, (number, number))
    assert locate(None, None, tmp_path) == tmp_path / "second"
    assert locate(tmp_path / "first", tmp_path / "second", tmp_path) == tmp_path / "first"
    assert locate(None, tmp_path / "first", tmp_path) == tmp_path / "first"


def test_an_unknown_schema_is_named(tmp_path):
    (tmp_path / FILE).write_text('{"schema": 2}\n')
    with pytest.raises(ConfigError, match="schema 2"):
        read(tmp_path)


@pytest.mark.parametrize("asked, configured", [(Path("none"), None), (None, Path("none")), (None, None)])
def test_a_run_that_is_not_there_is_an_error(tmp_path, asked, configured):
    with pytest.raises(ConfigError):
        locate(asked, configured, tmp_path)
