"""`hvdrecover report`: what it says, and how it exits."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from hvdrecover import cli
from tests.unit.reporting.runs import BEGIN, Run, example

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
def run(capsys):
    """Runs the command, and gives its exit code, its output and its errors."""

    def run(*arguments):
        code = cli.main(["report", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


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


def test_only_the_last_faults_are_shown(run, document):
    made = Run(Path("events"))
    for second in range(25):
        made.fault(second, detail=f"number {second}")
    lines = run("events")[1].splitlines()
    start = lines.index("the last 20 faults (--json lists all 25)") + 2
    assert [columns(line)[-1] for line in lines[start:]] == [f"number {second}" for second in range(5, 25)]
    assert len(document("events")["faults"]) == 25


def test_what_a_terminal_would_obey_is_escaped(run):
    made = Run(Path("events"))
    made.fault(1, "\x1b[31mcrash", host="node-1", detail="b [/red]c\x1b]0;title\x07\nand more")
    made.fault(3, "crash", detail="Traceback (most recent call last):\n  line 1\nValueError: no")
    made.report(2, "gave_up", scope="job", reason="\x1b[2J")
    output = run("events")[1]
    assert "\x1b" not in output
    assert r"b [/red]c\x1b]0;title\x07" in output and "and more" not in output
    assert "ValueError: no" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ([], "FOLDER: .*'hvdrecover-runs' "),
        (["missing"], "FOLDER: 'missing' "),
    ],
)
def test_without_events_there_is_an_error_of_one_line(run, arguments, facts):
    code, output, errors = run(*arguments)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert re.match(f"hvdrecover: {facts}", errors)
