"""``hvdrecover run --preflight``: what becomes of the job's options when hosts are left out."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import cli, record
from hvdrecover.doctor import examination
from hvdrecover.doctor.checks import Finding
from hvdrecover.doctor.examination import Report, Settings
from hvdrecover.launch import horovodrun, supervisor
from hvdrecover.launch.horovodrun import Options
from tests.support.processes import LAUNCHER_VARIABLES

TRAIN = ["--", "python", "train.py"]
WRONG = Finding("ssh", "failure", "h2: Connection refused", "Start a server.", ["h2"])
SLOW = Finding("clocks", "warning", "h1 +3.0 s", "Set the clock.")


class Job:
    """The hosts looked at, the findings, and the options of the job that was started then."""

    def __init__(self) -> None:
        self.looked_at: list[Settings] = []
        self.findings: list[Finding] = [Finding("ssh", "ok", "logged in"), SLOW, WRONG]
        self.options: Options | None = None


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    noted = Job()

    def examine(settings: Settings, *others: Any, hosts_only: bool) -> Report:
        assert hosts_only
        noted.looked_at.append(settings)
        return Report(False, {}, noted.findings)

    class Supervisor:
        def __init__(self, command: list[str], options: Options, *_: Any) -> None:
            noted.options = options

        def run(self) -> int:
            return 0

    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HVDRECOVER_EVENTS", str(tmp_path / "events"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "examine", examine)
    monkeypatch.setattr(supervisor, "Supervisor", Supervisor)
    monkeypatch.setattr(horovodrun, "is_ours", lambda: True)
    return noted


def run(job: Job, *words: str) -> Options:
    assert cli.main(["run", "--preflight", *words, *TRAIN]) == 0
    assert job.options is not None
    return job.options


def named_by(script: str | None) -> list[str]:
    """The hosts that a discovery script names."""
    assert script is not None
    return subprocess.check_output(script, shell=True, text=True).split()


def test_a_host_that_is_left_out_and_the_processes_that_are_left(
    job: Job, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "hvdrecover")
    options = run(job, "-np", "4", "--min-np", "1", "-H", "h1:2,h2:2,h3:1")
    assert options == Options(3, least=1, hosts="h1:2,h3:1")
    slow, wrong, all_in_all = [record.getMessage() for record in caplog.records]
    assert slow == "clocks: h1 +3.0 s. Set the clock."
    assert wrong == "h2 left out: ssh: h2: Connection refused. Start a server."
    assert all_in_all.startswith("2 of 3 hosts are used, for 3 processes; looked at them for ")
    (event,) = record.read(tmp_path / "events")
    assert event.kind == "preflight"
    assert event.facts["used"] == ["h1", "h3"]
    assert event.facts["excluded"] == {"h2": "ssh: h2: Connection refused. Start a server."}


def test_hosts_that_are_discovered_are_left_out_later_as_well(job: Job) -> None:
    Path("hosts").write_text("h1:2\nh2:2\n")
    options = run(job, "-np", "4", "--min-np", "2", "--discover", "file hosts --no-ssh-check")
    assert job.looked_at[0].hosts == {"h1": 2, "h2": 2}
    assert named_by(options.discovery) == ["h1:2"]
    Path("hosts").write_text("h2:2\nh3:2\nh1:2\n")
    script = shlex.split(str(options.discovery))
    place = script.index("file") + 1
    script[place:place] = ["--cache", "another"]  # the answer is remembered for a moment
    assert sorted(named_by(shlex.join(script))) == ["h1:2", "h3:2"]
