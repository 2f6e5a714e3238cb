import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import proxy_bypass

import pytest

from hvdrecover import config
from hvdrecover.checkpoint import Checkpoint
from hvdrecover.errors import ConfigError
from hvdrecover.launch.training import EARLY


def test_an_empty_environment_gives_the_defaults():
    assert config.read({}) == config.Config(host=socket.gethostname())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("runs/a", "/start/runs/a"),
        ("./a", "/start/a"),
        ("file://runs/a", "file:///start/runs/a"),
        ("/runs/a", "/runs/a"),
        ("file:///runs/a", "file:///runs/a"),
        ("~/runs", "~/runs"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("simplecache::s3://bucket/a", "simplecache::s3://bucket/a"),
    ],
)
def test_a_relative_path_is_below_the_folder_in_which_the_process_started(
    given, found, monkeypatch, tmp_path
):
    monkeypatch.setattr(config, "_STARTED_IN", Path("/start"))
    monkeypatch.chdir(tmp_path)  # as a script does
    assert config.read({"HVDRECOVER_CHECKPOINT": given}).checkpoint == found
    assert Checkpoint(given, near="near") == Checkpoint(found, near="/start/near")


def test_a_program_that_the_script_starts_in_another_folder_has_its_own_relative_paths(tmp_path):
    look = "from hvdrecover import config; print(config.absolute('root'), flush=True)"
    code = f"import os, subprocess, sys; os.mkdir('b'); os.chdir('b'); look = {look!r}"
    environ = {**os.environ, "PYTHONPATH": str(EARLY), "HVDRECOVER_SLOT": "0,0,0,0"}
    command = [sys.executable, "-c", f"{code}; subprocess.run([sys.executable, '-c', look]); exec(look)"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [f"{tmp_path}/b/root", f"{tmp_path}/root"]


def test_the_variables_of_users_launchers_and_guardians_are_read():
    found = config.read(
        {
            "HVDRECOVER_SLOT": "5,6,17,18",
            "HVDRECOVER_SUPERVISOR": "driver.example/4711:abc:def",
            "HVDRECOVER_STOP_SIGNALS": "sigterm, USR2,",
            "HVDRECOVER_SSH_OPTIONS": "",
            "HOROVOD_LOCAL_RANK": "2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "8080",
        }
    )
    assert found.slot == (5, 6, 17, 18)
    assert found.supervisor == ("10.0.0.1", 4711, "abc:def")  # where Horovod's driver was found
    assert found.stop_signals == (signal.SIGTERM, signal.SIGUSR2)
    assert found.ssh_options == ""
    assert found.local_rank == 2
    assert found.rendezvous == ("10.0.0.1", 8080)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("STOP_SIGNALS", "SIGTERM,NONSENSE", "NONSENSE .* SIGTERM,SIGUSR1"),
        ("STOP_SIGNALS", "15", "SIG15"),
        ("STOP_SIGNALS", "kill", "SIGKILL"),
        ("REOPEN", "yes", "'yes'"),
        ("NEAR", "near/here", "'near/here'"),
        ("EVENTS", "s3://bucket/events", "URL"),
        ("LOG", "loud", "debug, info"),
        ("MAX_RESTARTS", "-1", "≥ 0"),
        ("HANG_TIMEOUT", "4.9", "less than 5"),
        *(("MAX_DURABLE_AGE", text, f"'{text}'") for text in ("0", "-1", "nan", "inf", "10 min", "true")),
    ],
)
def test_an_invalid_value_is_an_error_that_names_the_variable(name, text, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        config.read({f"HVDRECOVER_{name}": text})
    assert caught.value.name == f"HVDRECOVER_{name}"


def test_a_process_that_is_alone_for_a_while_has_no_place_and_then_its_own_again(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOROVOD_RANK", "3")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "8080")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    before = dict(os.environ)
    with pytest.raises(KeyError), config.alone():
        assert [name for name in os.environ if name.startswith("HOROVOD_")] == ["HOROVOD_ELASTIC"]
        raise KeyError
    assert dict(os.environ) == before


def test_what_a_guardian_gave_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("HVDRECOVER_SLOT", "1,2,3,4")
    monkeypatch.setenv("HVDRECOVER_REJOIN", "1")
    given = os.memfd_create("page")
    os.set_inheritable(given, True)
    config.keep_to_this_process(given)
    assert not os.get_inheritable(given)
    assert not {"HVDRECOVER_SLOT", "HVDRECOVER_REJOIN"} & set(config.environment())
    os.close(given)


@pytest.fixture
def clean_environment(monkeypatch):
    # Set first, so that the end of the test takes them away whoever set them.
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environ", "parent_ran_alone", "chosen"),
    [
        ({}, False, "gloo"),
        ({"PMIX_RANK": "0"}, False, None),
        ({"HOROVOD_CONTROLLER": "mpi"}, False, "mpi"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, True, None),
        ({"HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, True, "gloo"),
    ],
)
def test_a_controller_is_chosen_only_where_nobody_chose_one(
    clean_environment, monkeypatch, environ, parent_ran_alone, chosen
):
    if parent_ran_alone:  # under mpirun, a child inherits no choice from it
        config.choose_controller(config.read({}))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config.choose_controller(config.read())
    assert os.environ.get("HOROVOD_CONTROLLER") == os.environ.get("HOROVOD_CPU_OPERATIONS", chosen) == chosen


@pytest.mark.parametrize(
    ("environ", "exempt"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": ".site"}, ".site,10.0.0.7"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, "*"),
    ],
)
def test_the_rendezvous_is_reached_without_the_proxy(monkeypatch, environ, exempt):
    monkeypatch.setattr(os, "environ", {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.7", **environ})
    for _ in range(2):
        config.bypass_proxy()
        assert os.environ.get("no_proxy") == exempt
    if exempt:
        assert proxy_bypass("10.0.0.7")


def test_the_page_of_settings_is_what_is_declared():
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    for setting in config.SETTINGS:
        option = f"`{setting.flag}`" if setting.option else ""
        assert f"| `{setting.variable}` | {option} | {setting.help}" in page
    assert [field.name for field in dataclasses.fields(Checkpoint) if f"`{field.name}" not in page] == []


@pytest.mark.parametrize(
    ("variable", "packaged", "told"), [(None, True, True), (None, False, False), ("OPAL_PREFIX", True, False)]
)
def test_open_mpi_from_pypi_is_told_where_it_is(variable, packaged, told, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpicxx").touch()
    monkeypatch.setattr(config.metadata, "distributions", lambda name: [name] * packaged)
    found = config.open_mpi({variable: "/opt"} if variable else {})
    assert found == ({"OPAL_PREFIX": str(tmp_path)} if told else {})
