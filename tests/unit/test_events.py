import ast
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import hvdrecover
from hvdrecover import config, events
from hvdrecover.errors import ConfigError
from hvdrecover.events import FILE, Events, Follower, Pipe, Record, locate, read

DOCS = Path(__file__).parents[2] / "docs" / "events.md"


def test_without_a_guardian_rank_0_records_its_own(tmp_path):
    for rank in (0, 1):
        log = events.of_training(config.read({"HVDRECOVER_EVENTS": str(tmp_path)}))
        log.rank = rank
        log.emit("commit", commit=rank)
    assert [event.whole("commit") for event in read(tmp_path)] == [0]


def test_events_wait_for_a_guardian_that_does_not_read_and_training_does_not():
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    log = Events(Pipe(theirs).add, "h")
    sent = 2000  # more than the pipe takes
    for number in range(sent):
        log.emit("commit", commit=number)
    received = b""
    while received.count(b"\n") < sent:
        received += os.read(ours, 1 << 20)
        log.emit("more")
    lines = [json.loads(line) for line in received.splitlines()]
    assert [line["commit"] for line in lines if line["kind"] == "commit"] == list(range(sent))
    os.close(ours)
    os.close(theirs)


def test_without_a_folder_only_the_line_for_people_is_written(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "hvdrecover"):
        Events(None, "h").emit("sync", "resumed", size=2)
    assert caplog.messages == ["resumed"]
    assert list(tmp_path.iterdir()) == []


EMITTERS = ("emit", "_emit", "announce", "_announce", "_report")


def test_every_kind_that_the_package_emits_is_documented():
    emitted = set()
    for file in Path(hvdrecover.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in EMITTERS:
                emitted |= {kind.value for kind in node.args[:1] if isinstance(kind, ast.Constant)}
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), flags=re.MULTILINE))
    assert {"commit", "durable", "skipped", "sync"} <= emitted
    assert emitted <= documented


@contextmanager
def bare_logging():
    """Logging as in a program that has not set it up; no fixture, as pytest adds its handler after those."""
    ours, root = events.logger, logging.getLogger()
    before = (ours.handlers[:], ours.propagate, ours.level, root.handlers[:])
    ours.handlers, root.handlers = [], []
    try:
        yield root
    finally:
        ours.handlers, ours.propagate, root.handlers = before[0], before[1], before[3]
        ours.setLevel(before[2])


def test_lines_go_to_stderr_once(capsys):
    settings = config.read({})
    with bare_logging():
        events.show_on_terminal(settings)
        events.show_on_terminal(settings)
        Events(None, "h").emit("sync", "resumed")
    assert capsys.readouterr().err == "hvdrecover: resumed\n"


def test_a_program_that_set_up_logging_keeps_its_own_way():
    with bare_logging() as root:
        root.addHandler(logging.NullHandler())
        events.show_on_terminal(config.read({}))
        assert events.logger.handlers == []
        assert events.logger.propagate


# -- the record ------------------------------------------------------------------------------------------


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
        "import sys\nfrom pathlib import Path\nfrom hvdrecover.events import Record\n"
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
