"""The commands that start jobs: what they make of their arguments."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import cli, events
from hvdrecover.config import Config
from hvdrecover.doctor import examination
from hvdrecover.doctor.examination import Finding, Settings
from hvdrecover.launch import horovodrun, supervisor
from tests.support.commands import LAUNCHER_VARIABLES, answer

KEY = __file__  # a file that is there
TRAIN = ["--", "python", "train.py", "--epochs", "3"]


Noted = list[Any]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A terminal of a user who has set nothing, in an empty folder."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """The jobs that were started: command, settings and configuration."""
    noted: Noted = []

    class Supervisor:
        def __init__(self, *arguments: Any) -> None:
            noted.append(arguments)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Supervisor)
    monkeypatch.setattr(horovodrun, "is_ours", lambda: True)
    return noted


def job(jobs: Noted, *words: str) -> tuple[list[str], horovodrun.Options, dict[str, str], Config]:
    """Return the command, options, variables and configuration of a job that is started."""
    assert cli.main(["run", *words]) == 0
    command, options, environ, config, _ = jobs.pop()
    return command, options, environ, config


# -- run ---------------------------------------------------------------------------------------------------


def test_all_options_of_a_job(jobs: Noted) -> None:
    words = ["-np", "4", "--min-np", "2", "--max-np", "8", "-H", "h1:4,h2:4", "-p", "2222", "-i", KEY]
    words += ["--network-interface", "eth0", "--network-interfaces", "eth1"]
    words += ["--checkpoint", "s3://bucket/run", "--max-restarts", "0", "--hang-timeout", "2m"]
    words += ["--grace", "90.5", "--no-standby", "--startup-timeout", "10m"]
    _, options, environ, config = job(jobs, *words, *TRAIN)
    assert options == horovodrun.Options(
        4, least=2, most=8, hosts="h1:4,h2:4", interfaces=("eth0", "eth1"), ssh_port=2222, identity=KEY
    )
    assert environ["HVDRECOVER_CHECKPOINT"] == "s3://bucket/run"
    assert (config.max_restarts, config.grace) == (0, 90.5)
    given = {"HANG_TIMEOUT": "2m", "GRACE": "90.5", "NO_STANDBY": "1", "STARTUP_TIMEOUT": "10m"}
    assert {name: environ[f"HVDRECOVER_{name}"] for name in given} == given
    assert environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] == "15"


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Host discovery remembers nothing of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_memory")
def test_hosts_that_are_discovered(jobs: Noted) -> None:
    words = ["-np", "2", "--max-np", "3", "-p", "2222", "-i", KEY]
    _, options, _, _ = job(jobs, *words, "--discover", "static 'localhost:2' --slots 4", *TRAIN)
    script = options.discovery
    assert script is not None
    assert shlex.split(script) == [
        *(sys.executable, "-m", "hvdrecover", "discover", "static", "--allow-empty", "--max-np", "3"),
        *("--ssh-port", "2222", "--identity", KEY, "localhost:2", "--slots", "4"),
    ]
    assert subprocess.check_output(script, shell=True, text=True) == "localhost:2\n"


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("", "--discover: "),
        ("rack", "host source 'rack': .* static, file, command"),
        ("file missing", "file: missing: .*No such file or directory"),
        ("static a:x", "static: a:x: 'a': slots .*'x'"),
    ],
)
def test_a_source_that_can_not_be_asked_is_told_before_anything_is_started(
    source: str, facts: str, jobs: Noted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "-np", "2", "--discover", source, *TRAIN]) == 1
    assert re.match(f"hvdrecover: {facts}", capsys.readouterr().err)
    assert not jobs


@pytest.mark.parametrize(
    "others", [["--cycle-time-ms=3.5", "--autotune"], ["--blacklist-cooldown-range", "1", "2"]]
)
@pytest.mark.parametrize("first", [False, True])
def test_options_of_horovodrun_that_are_not_ours_are_handed_on(
    others: list[str], first: bool, jobs: Noted
) -> None:
    own = ["-np", "2", "--grace", "9"]
    _, options, _, config = job(jobs, *(others + own if first else own + others), *TRAIN)
    assert options == horovodrun.Options(2, others=tuple(others))
    assert config.grace == 9.0


def test_an_option_takes_precedence_over_the_environment(
    jobs: Noted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hvdrecover.config._STARTED_IN", str(tmp_path))
    monkeypatch.setenv("HVDRECOVER_EVENTS", "events")
    monkeypatch.setenv("HVDRECOVER_CHECKPOINT", "root")
    monkeypatch.setenv("HVDRECOVER_GRACE", "1m")
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "77")
    _, _, environ, config = job(jobs, "-np", "2", *TRAIN)
    assert config.events == tmp_path / "events"
    assert environ["HVDRECOVER_EVENTS"] == str(tmp_path / "events")
    assert environ["HVDRECOVER_CHECKPOINT"] == str(tmp_path / "root")
    assert config.grace == 60.0
    _, _, environ, _ = job(jobs, "-np", "2", "--checkpoint", "other", *TRAIN)
    assert environ["HVDRECOVER_CHECKPOINT"] == str(tmp_path / "other")
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" not in environ


def test_all_settings_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HVDRECOVER_CHECKPOINT", "s3://user:secret@bucket/run")
    assert cli.main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "s3://bucket/run" in shown and "HVDRECOVER_NO_STANDBY" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "2"],
        ["--hostfile=hosts", "-np", "2", "--no-standby"],
        ["-np", "2", "--blacklist-cooldown-range", "1", "2"],
    ],
)
def test_a_command_needs_no_dashes_and_its_options_are_its_own(words: list[str], jobs: Noted) -> None:
    Path("hosts").write_text("h1 slots=2\n")
    own = ["python", "train.py", "-np", "3", "--no-standby", "--", "--mpi"]
    bare, with_dashes = job(jobs, *words, *own), job(jobs, *words, "--", *own)
    assert bare[0] == own == with_dashes[0]
    assert bare[1] == with_dashes[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run"], "the following arguments are required: -np/--num-proc"),
        (["run", "-np", "2", "--min-np", "3"], "--min-np 3 is more than -np 2"),
        (["run", "-np", "2", "--max-np", "1"], "--max-np 1 is less than -np 2"),
        (["run", "-np", "2", "-H", "h1"], "the hosts have too few slots: 1, and -np asks for 2"),
        (["run", "-np", "2", "--mpi", "-H", "h1;touch${IFS}pwned:2"], "'h1;touch${IFS}pwned'"),
        (["run", "-np", "2", "--hostfile", "nowhere"], "nowhere"),
        (["run", "-np", "2", "-i", "no-key"], "no-key"),
        (["run", "-np", "2", "--hang-timeout", "4.9"], "argument --hang-timeout: 4.9 "),
        (["run", "-np", "2", "--grace", "0"], "argument --grace: must be a duration > 0 such as "),
        (["run", "-np", "2", "-H", "h1:2", "--hostfile", "hosts"], "not allowed with argument -H/--hosts"),
        (["run", "-np", "2", "--max-re", "7"], "unrecognized arguments: --max-re"),
        (["run", "-np", "2", "--hang-timout=3"], "--hang-timout=3; did you mean --hang-timeout?"),
        (["run", "-np", "2", "--timeline-filname=x"], "did you mean --timeline-filename?"),  # of Horovod
        (["run", "-np", "2", "--reset-limit", "x"], "argument --reset-limit"),
        (["drill", "-np", "2", "--reset-limit", "x"], "argument --reset-limit"),
        (["drill", "-np", "2", "--grace", "x"], "argument --grace"),
        (["drill", "-np", "2", "--sed=3"], "did you mean --seed?"),
        (["worker", "--grase=3"], "did you mean --grace?"),
    ],
)
def test_wrong_options_exit_with_2(
    words: list[str], problem: str, jobs: Noted, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, *TRAIN])
    assert caught.value.code == 2 and problem in capsys.readouterr().err
    assert jobs == []


# -- run --preflight ---------------------------------------------------------------------------------------

WRONG = Finding("ssh", "failure", "h2: Connection refused", "Start a server.", ["h2"])
SLOW = Finding("clocks", "warning", "h1 +3.0 s", "Set the clock.")


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch, no_memory: None) -> list[Settings]:
    """The settings of all examinations; h2 is found broken."""
    noted: list[Settings] = []

    def examine(settings: Settings, *, hosts_only: bool) -> list[Finding]:
        assert hosts_only
        noted.append(settings)
        return [Finding("ssh", "ok", "logged in"), SLOW, WRONG]

    monkeypatch.setattr(examination, "examine", examine)
    monkeypatch.setenv("HVDRECOVER_EVENTS", str(Path("events").absolute()))
    return noted


def test_a_host_that_is_left_out_and_the_processes_that_are_left(
    jobs: Noted, looked_at: list[Settings], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hvdrecover")
    words = ["--preflight", "-np", "4", "--min-np", "1", "-H", "h1:2,h2:2,h3:1"]
    _, options, _, _ = job(jobs, *words, *TRAIN)
    assert options == horovodrun.Options(3, least=1, hosts="h1:2,h3:1")
    slow, wrong, all_in_all = [record.getMessage() for record in caplog.records]
    assert slow == "clocks: h1 +3.0 s. Set the clock."
    assert wrong == "h2 left out: ssh: h2: Connection refused. Start a server."
    assert all_in_all.startswith("2 of 3 hosts are used, for 3 processes; looked at them for ")
    (event,) = events.read(Path("events"))
    assert (event.kind, event.facts["used"]) == ("preflight", ["h1", "h3"])
    assert event.facts["excluded"] == {"h2": "ssh: h2: Connection refused. Start a server."}


def test_hosts_that_are_discovered_are_left_out_later_as_well(jobs: Noted, looked_at: list[Settings]) -> None:
    Path("hosts").write_text("h1:2\nh2:2\n")
    words = ["--preflight", "-np", "4", "--min-np", "2", "--discover", "file hosts --no-ssh-check"]
    _, options, _, _ = job(jobs, *words, *TRAIN)
    assert looked_at[0].hosts == {"h1": 2, "h2": 2}
    Path("hosts").write_text("h2:2\nh3:2\nh1:2\n")
    script = shlex.split(str(options.discovery))
    place = script.index("file") + 1
    script[place:place] = ["--cache", "another"]  # the answer is remembered for a moment
    assert sorted(subprocess.check_output(script, text=True).split()) == ["h1:2", "h3:2"]


# -- worker ------------------------------------------------------------------------------------------------


# -- all commands ------------------------------------------------------------------------------------------


def test_neither_horovod_nor_a_framework_is_imported_to_guard(tmp_path: Path) -> None:
    code = """
import sys
from hvdrecover import cli
code = cli.main(["worker", "--", sys.executable, "-c", "raise SystemExit(0)"])
print(code, sorted({"torch", "tensorflow", "keras", "horovod", "numpy"} & set(sys.modules)))
"""
    assert answer(code) == "1 []"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hvdrecover: {gracee: 9s}", "unknown setting 'gracee'"),
        ("hvdrecover: [grace, 9s]", "must be YAML"),
        ("hvdrecover: {grace: 9\udcff}", "must be YAML"),
    ],
)
def test_a_wrong_setting_in_a_file_is_an_error(
    text: str, problem: str, jobs: Noted, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text(text, errors="surrogateescape")
    assert cli.main(["run", "-np", "2", "--config-file", "c.yaml", *TRAIN]) == 1
    assert problem in capsys.readouterr().err


def test_a_variable_takes_precedence_over_the_file(jobs: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.yaml").write_text("hvdrecover: {grace: 9s, max-restarts: 3, no-standby: true}")
    monkeypatch.setenv("HVDRECOVER_GRACE", "1m")
    _, _, environ, config = job(jobs, "-np", "2", "--config-file", "c.yaml", *TRAIN)
    assert (config.grace, config.max_restarts, config.no_standby) == (60.0, 3, True)
    assert environ["HVDRECOVER_NO_STANDBY"] == "1"
