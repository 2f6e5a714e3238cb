import ast
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import hvdrecover
from hvdrecover import config, events
from hvdrecover.events import Events, Pipe
from hvdrecover.record import read

DOCS = Path(__file__).parents[2] / "docs" / "events.md"


def test_without_a_guardian_rank_0_records_its_own(tmp_path):
    for rank in (0, 1):
        log = events.of_training(config.read({"HVDRECOVER_EVENTS": str(tmp_path)}))
        log.rank = rank
        log.emit("commit", commit=rank)
    assert [event.whole("commit") for event in read(tmp_path)] == [0]


def test_a_guardian_gets_what_was_emitted_before_its_process_is_killed(tmp_path):
    ours, theirs = os.pipe2(os.O_NONBLOCK)
    code = (
        "import os, signal, sys\n"
        "from hvdrecover.events import Events, Pipe\n"
        f"log = Events(Pipe({theirs}).add, 'h')\n"
        "for number in range(50): log.emit('commit', commit=number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], pass_fds=[theirs], check=False)
    lines = os.read(ours, 1 << 16).splitlines()
    assert [json.loads(line)["commit"] for line in lines] == list(range(50))
    os.close(ours)
    os.close(theirs)


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


def test_a_program_that_set_up_logging_keeps_its_own_way():
    with bare_logging() as root:
        root.addHandler(logging.NullHandler())
        events.show_on_terminal(config.read({}))
        assert events.logger.handlers == []
        assert events.logger.propagate
