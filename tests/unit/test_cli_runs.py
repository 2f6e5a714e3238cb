"""The texts and exit codes of `hvdrecover report`, `status` and `stop`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hvdrecover import cli, machine
from hvdrecover.cli import printer, runs
from hvdrecover.config import PREEMPTED
from hvdrecover.events import Follower, read
from hvdrecover.launch import presence
from hvdrecover.launch.presence import Supervised
from hvdrecover.reporting import summary
from hvdrecover.reporting.prometheus import Exporter
from tests.fakes.clock import FakeClock
from tests.unit.reporting.runs import BEGIN, REPLACED, TWO, Run, example

PLACES = {"generation": 1, "commit": 2, "pid": 10}
DOCS = Path(__file__).parents[2] / "docs" / "commands.md"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder, in the time zone of the documentation's example."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HVDRECOVER_EVENTS", raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def command(capsys):
    """Runs a command, and gives its exit code, its output and its errors."""
    return lambda *words: (cli.main([*map(str, words)]), *capsys.readouterr())


@pytest.fixture
def run(command):
    """Runs `hvdrecover report`."""
    return lambda *arguments: command("report", *arguments)


@pytest.fixture
def document(run):
    """Runs the command with ``--json``, and gives the document."""
    return lambda *arguments: json.loads(run(*arguments, "--json")[1])


def columns(line):
    return re.split(r"  +", line.strip())


def keys(value):
    """All keys of a document but those that are names of hosts, kinds and phases."""
    if isinstance(value, list):
        return {key for item in value for key in keys(item)}
    if not isinstance(value, dict):
        return set()
    named = ("phases", "versions")
    inner = [
        list(item.values()) if key == "kinds" else item for key, item in value.items() if key not in named
    ]
    return set(value) | keys(inner)


def test_the_documentation_s_example_is_what_the_command_says(run):
    example(Path("hvdrecover-runs/20260101T120000Z-1234"))
    code, output, errors = run()
    assert (code, errors) == (0, "")
    assert f"\n$ hvdrecover report\n{output}```\n" in DOCS.read_text()


def test_the_documentation_names_every_key(document):
    example(Path("events"))
    (row,) = [line for line in DOCS.read_text().splitlines() if line.startswith("| report |")]
    assert [key for key in sorted(keys(document("events")) - {"schema"}) if f"`{key}`" not in row] == []


def test_a_run_that_is_under_way_says_so(run, document):
    made = Run(Path("events"))
    made.report(time.time() - BEGIN, "start", attempt=1, command=[])
    made.fault(time.time() - BEGIN, "lost_host", slot=None)
    output = run("events")[1]
    assert re.search(r"\nstate +starting\n", output) and re.search(r"\nlast event +0\.\d+ s ago\n", output)
    assert columns(output.splitlines()[-1])[1:] == ["lost_host", "node-1", "all", "not recovered yet"]
    assert (document("events")["outcome"], document("events")["faults"][0]["recovery"]) == ("open", None)


def test_what_a_terminal_would_obey_is_escaped(run):
    made = Run(Path("events"))
    made.fault(1, "\x1b[31mcrash", host="node-1", detail="b [/red]c\x1b]0;title\x07\nand more")
    made.fault(3, "crash", detail="Traceback (most recent call last):\n  line 1\nValueError: no")
    made.report(2, "gave_up", scope="job", reason="\x1b[2J")
    output = run("events")[1]
    assert "\x1b" not in output
    assert r"b [/red]c\x1b]0;title\x07" in output and "and more" not in output
    assert "ValueError: no" in output and "Traceback" not in output


# -- report --watch ------------------------------------------------------------------------------------


class Story(FakeClock):
    """A clock that writes the next part of a run whenever somebody waits for it."""

    def __init__(self, *parts):
        super().__init__(BEGIN)
        self.parts = list(parts)

    def wait(self, event, timeout):
        if self.parts:
            self.parts.pop(0)()
        return super().wait(event, timeout)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9400", ("", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("run.prom", Path("run.prom")),
        ("./odd:9400", Path("odd:9400")),
        ("a:b:1", Path("a:b:1")),
    ],
)
def test_where_metrics_go(text, expected):
    assert runs.target(text) == expected


def test_lines_tell_what_changes(capsys):
    run = Run(Path("events"))
    run.report(0, "start", pid=5, attempt=1, command=[])
    error = {**PLACES, "error": "disk \x1b[31mfull", "age": 1.0, "attempt": 1}
    clock = Story(
        lambda: run.rendezvous(4, TWO, 1, 0, "initial"),
        lambda: run.commit(TWO, 1, {1: 5}),
        lambda: (run.commit(TWO, 1, {2: 7}), run.report(8, "outage", **error)),
        lambda: run.report(9, "durable", **PLACES, bytes=1, seconds=0.1),
        lambda: run.fault(10, host="node-2", rank=1, commit=[1, 2], detail="killed by SIGKILL"),
        lambda: (run.rendezvous(12, REPLACED, 2, 2), run.step(13, REPLACED, 2, 2)),
        lambda: run.report(14, "gave_up", pid=5, scope="job", reason="no restarts left"),
        lambda: run.report(16, "end", pid=5, code=3, reason="gave up"),
    )
    runs.follow(Follower(Path("events")), [runs.lines(clock)], clock)
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]
    fault = r"last fault: 01-01 \S+ crash of rank 1 on node-2: killed by SIGKILL; "
    expected = [
        *("state: starting", "faults: 0", "starts: 1 of the job, 0 of single processes"),
        *("progress: there was no rendezvous yet", "state: training"),
        "progress: commit 0 in generation 1 with 2 ranks",
        r"storage: fails since 01-01 \S+; 1 outage, 0\.00 s: disk \\x1b\[31mfull",
        "progress: commit 2 in generation 1 with 2 ranks",
        r"storage: works; 1 outage, 0\.00 s",
        *("state: recovering", r"faults: 1 \(1 crash\); 0 recovered from", f"{fault}not recovered yet"),
        *("state: training", r"faults: 1 \(1 crash\); 1 recovered from", fault + r"recovered in 3\.01 s"),
        "progress: commit 2 in generation 2 with 2 ranks",
        "given up: the job: no restarts left",
        "state: ended before it was finished, with code 3: gave up",
    ]
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--watch", "--json"], "--watch: .*--json or --html"),
        (["--watch", "--html", "page.html"], "--watch: .*--json or --html"),
        (["--prometheus", ":9400"], "--prometheus: .*--watch"),
        (["--prometheus", "missing/run.prom"], r"--prometheus: 'missing/run\.prom' "),
        (["--watch", "--prometheus", "203.0.113.1:0"], r"--prometheus: '203\.0\.113\.1:0' .*HOST:PORT"),
    ],
)
def test_what_can_t_be_done_is_an_error_of_one_line(run, arguments, facts):
    example(Path("events"))
    code, output, errors = run("events", *arguments)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert re.match(f"hvdrecover: {facts}", errors)


def documented():
    """The run of the documentation, as far as it has got after 101 s, and more that may be told of one."""
    run = example(Path("hvdrecover-runs/20260101T120000Z-1234"))
    for commit, second in {1: 14, 2: 24, 3: 34, 4: 46, 5: 56, 6: 92}.items():
        run.report(second + 0.6, "durable", pid=10, generation=1, commit=commit, bytes=1000, seconds=0.5)
    early = (event for event in read(run.folder) if event.time < BEGIN + 101)
    return run.folder, summary.Run(early).report()


def test_the_documentation_s_example_is_what_a_terminal_shows(capsys):
    printer.put_text([runs.frame(*documented(), BEGIN + 101)])
    assert f"\n$ hvdrecover report --watch\n{capsys.readouterr().out}```\n" in DOCS.read_text()


def test_the_documentation_names_every_metric():
    folder, status = documented()
    exporter = Exporter(str(folder))
    exporter.update(status)
    names = {sample.name for family in exporter.registry.collect() for sample in family.samples}
    assert len(names) > 20
    section = DOCS.read_text().partition("## Following a run")[2].partition("## `--json`")[0]
    told = set(re.findall(r"`(\w+)(?:\{\w+\})?`", section))
    assert [name for name in sorted(names) if name.removeprefix("hvdrecover_") not in told] == []


# -- status and stop ----------------------------------------------------------------------------------

LEAVES = """
import signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.reporting.runs import TWO, Run
def leave(*_):
    run = Run(Path(sys.argv[1]))
    run.commit(TWO, 1, {9: 50})
    run.report(51, "durable", rank=0, generation=1, commit=int(sys.argv[3]), bytes=1, seconds=0.5)
    run.report(52, "end", pid=5, code=75, reason="left")
    sys.exit(75)
signal.signal(signal.SIGUSR1, leave)
print(flush=True)
signal.pause()
"""


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A run of two ranks that trains: one fault, one commit that is not durable, a standby for each slot."""
    monkeypatch.setenv("HVDRECOVER_EVENTS", str(tmp_path / "events"))
    run = Run(tmp_path / "events")
    run.report(0, "start", pid=5, attempt=1, command=["python", "train.py"])
    run.rendezvous(1, TWO, 1, 0, "initial")
    run.commit(TWO, 1, {1: 2, 2: 3})
    run.report(3, "durable", rank=0, generation=1, commit=1, bytes=10, seconds=0.5)
    run.report(4, "standby", pid=9, slot=0, ready=True)
    run.report(4, "standby", "node-2", 9, slot=0, ready=True)
    run.fault(5, detail="killed by SIGKILL", rank=1, host="node-2")
    run.report(5, "standby", "node-2", 9, slot=0, ready=False)
    return run


def supervised(pid: int, **facts: object) -> Supervised:
    known = {"processes": 3, "least": 2, "stop_signal": "SIGUSR1", "grace": 30.0, "leaving": False, **facts}
    return Supervised("node-1", pid, machine.identity(pid), 1.0, ["python", "train.py"], **known)


def pairs(text):
    return dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())


def test_status_says_what_runs(training, command):
    presence.announce(training.folder, supervised(os.getpid()))
    code, text, _ = command("status")
    found = json.loads(command("status", "--json")[1])
    said = pairs(text)
    assert code == 0
    assert (said["state"], said["ranks"], said["standbys"]) == ("recovering", "2 of 3; 2 suffice", "1 ready")
    assert said["supervisor"] == f"process {os.getpid()} on node-1"
    assert said["command"] == "python train.py"
    assert said["progress"] == "commit 2 in generation 1 with 2 ranks"
    assert re.match(r"commit 1, \S+ d \S+ h old; 1 in all", said["durable"])
    assert "crash of rank 1 on node-2: killed by SIGKILL; not recovered yet" in said["last fault"]
    run = found["run"]
    assert (found["running"], found["supervisor"]["processes"]) == (True, 3)
    assert (run["ranks"], run["standbys"], run["commit"]["number"]) == (2, 1, 2)
    assert (run["storage"]["durable"]["number"], run["faults"][-1]["kind"]) == (1, "crash")
    assert [key for key in (*found, *found["supervisor"]) if f"`{key}`" not in DOCS.read_text()] == []


def test_status_tells_a_run_whose_supervisor_is_gone_from_one_that_leaves_and_one_that_has_ended(
    training, command
):
    announced = presence.announce(training.folder, supervised(os.getpid(), leaving=True))
    assert pairs(command("status")[1])["state"] == "recovering; it leaves at its next commit"
    announced.unlink()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        killed = supervised(child.pid)
    presence.announce(training.folder, killed)
    code, text, _ = command("status")
    assert (code, pairs(text)["state"][:34]) == (1, "gone: its supervisor has ended wit")
    assert json.loads(command("status", "--json")[1])["running"] is False
    training.report(9, "end", pid=5, code=1, reason="gave up")
    code, text, _ = command("status")
    assert (code, pairs(text)["state"]) == (1, "ended before it was finished, with code 1: gave up")


@pytest.mark.parametrize(
    ("durable", "code", "said"),
    [("9", 0, "commit 9 is durable\n"), ("8", 1, "commit 8 is durable, commit 9 is not\n")],
)
def test_stop_waits_until_the_job_has_left(training, command, durable, code, said):
    words = [sys.executable, "-c", LEAVES, str(training.folder), str(Path(__file__).parents[2]), durable]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        presence.announce(training.folder, supervised(child.pid))
        found, text, errors = command("stop", str(training.folder))
        assert child.wait() == PREEMPTED
    assert (found, text.endswith(f" {75}; {said}")) == (code, True)
    assert errors == "hvdrecover: the job leaves at its next commit, within 30 s\n"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda mine: mine.rpartition(" ")[0] + " 1", "has ended; "),  # its number was used again
        (lambda mine: f"elsewhere {mine.partition(' ')[2]}", "SIGUSR1"),
        (lambda mine: mine.replace("pid:[", "pid:[9"), "container; "),
        (lambda mine: "", "container; "),
    ],
)
def test_stop_takes_no_other_process_for_the_supervisor(training, command, other, problem):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = other(machine.identity(child.pid))
        presence.announce(training.folder, replace(supervised(child.pid), process=identity))
        code, _, errors = command("stop")
        assert (code, child.poll()) == (1, None)
    assert problem in errors
