import ast
import json
import logging
import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

import hvdrecover
from hvdrecover import config, events
from hvdrecover.events import Events
from tests.fakes.clock import FakeClock

DOCS = Path(__file__).parents[2] / "docs" / "events.md"


def lines_in(folder):
    (file,) = folder.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_an_event_is_one_line_of_json(tmp_path):
    log = Events(tmp_path / "new" / "folder", "node-7", FakeClock(start=5.0))
    log.rank = 3
    log.emit("commit", generation=1, commit=20)
    log.emit("finished", "done")
    common = {"time": 5.0, "host": "node-7", "pid": os.getpid(), "rank": 3}
    assert lines_in(tmp_path / "new" / "folder") == [
        {**common, "kind": "commit", "generation": 1, "commit": 20},
        {**common, "kind": "finished"},
    ]


def test_without_a_folder_only_the_line_for_people_is_written(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "hvdrecover"):
        Events(None, "h").emit("sync", "resumed", size=2)
    assert caplog.messages == ["resumed"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported_once_and_never_raises(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = Events(tmp_path / "file" / "events", "h")
    log.emit("start")
    log.emit("start")
    assert len([message for message in caplog.messages if "no further events" in message]) == 1


def test_a_disk_that_hangs_costs_events_and_one_line_until_it_answers(tmp_path, caplog):
    log = Events(tmp_path, "h", seconds=0.5)
    file = tmp_path / f"h-{os.getpid()}.jsonl"
    os.mkfifo(file)  # opening it to write blocks until there is a reader
    log.emit("left-out")
    log.emit("left-out")
    assert len([message for message in caplog.messages if "does not take events" in message]) == 1
    with file.open() as reader:  # the first line, which has waited, is written
        assert json.loads(reader.readline())["kind"] == "left-out"
        written = ""
        while not written:  # its thread ends in a moment
            log.emit("written")
            os.set_blocking(reader.fileno(), False)
            written = reader.readline()
        assert json.loads(written)["kind"] == "written"


class Unprintable:
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize("fact", [Unprintable(), {(1, 2): 3}, Path("/x"), float("nan"), b"\xff", "\ud800"])
def test_no_fact_makes_emit_raise_or_ends_the_log(tmp_path, fact):
    log = Events(tmp_path, "h")
    log.emit("odd", fact=fact)
    log.emit("next")
    assert lines_in(tmp_path)[-1]["kind"] == "next"


def test_a_fact_that_contains_itself_does_not_raise(tmp_path):
    knot = []
    knot.append(knot)
    log = Events(tmp_path, "h")
    log.emit("odd", fact=knot)
    log.emit("next")
    assert [line["kind"] for line in lines_in(tmp_path)] == ["next"]


EMITTERS = ("emit", "announce", "_announce", "_report")


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
    """Logging as in a program that has not set it up; put back at the end.

    Not a fixture, because pytest adds its own handler after those.
    """
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


def test_the_log_level_is_obeyed(capsys):
    with bare_logging():
        events.logger.setLevel(logging.NOTSET)
        events.show_on_terminal(config.read({"HVDRECOVER_LOG": "warning"}))
        Events(None, "h").emit("sync", "resumed")
        Events(None, "h").emit("skipped", "skipping", level=logging.WARNING)
    assert capsys.readouterr().err == "hvdrecover: skipping\n"


def test_the_level_that_a_program_has_given_to_the_logger_is_kept(capsys):
    with bare_logging():
        events.logger.setLevel(logging.ERROR)
        events.show_on_terminal(config.read({"HVDRECOVER_LOG": "debug"}))
        Events(None, "h").emit("skipped", "skipping", level=logging.WARNING)
    assert capsys.readouterr().err == ""


def test_a_program_that_set_up_logging_keeps_its_own_way():
    with bare_logging() as root:
        root.addHandler(logging.NullHandler())
        events.show_on_terminal(config.read({}))
        assert events.logger.handlers == []
        assert events.logger.propagate
