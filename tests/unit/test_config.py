import dataclasses
import os
import signal
import socket
from pathlib import Path
from urllib.request import proxy_bypass

import pytest

from hvdrecover import config
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.errors import ConfigError


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


def test_what_a_launcher_and_our_own_processes_say_is_read():
    found = config.read(
        {
            "HVDRECOVER_SLOT": "5,6,17,18",
            "HVDRECOVER_REJOIN": "1",
            "HVDRECOVER_REOPEN": "1",
            "HVDRECOVER_SUPERVISOR": "driver.example/4711:abc:def",
            "HVDRECOVER_STOP_SIGNALS": "sigterm, USR2,",
            "HVDRECOVER_SSH_OPTIONS": "-o ConnectTimeout=9",
            "HVDRECOVER_REMOTE_SHELL": "my-shell --fast",
            "HVDRECOVER_INSTRUMENTS": "some.module",
            "HVDRECOVER_REHEARSAL": "1",
            "HOROVOD_LOCAL_RANK": "2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "8080",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "12",
            "PATH": "/bin",
        }
    )
    assert found.slot == (5, 6, 17, 18)
    assert found.rejoins and found.reopen
    assert found.supervisor == ("10.0.0.1", 4711, "abc:def")  # where Horovod's driver was found
    assert found.stop_signals == (signal.SIGTERM, signal.SIGUSR2)
    assert found.ssh_options == "-o ConnectTimeout=9"
    assert found.remote_shell == "my-shell --fast"
    assert found.instruments == "some.module"
    assert found.rehearsal
    assert found.local_rank == 2
    assert found.rendezvous == ("10.0.0.1", 8080)
    assert found.collective_seconds == 12.0
    assert found.path == "/bin"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HVDRECOVER_SUPERVISOR", "h1"),
        ("HVDRECOVER_SUPERVISOR", "h1/port:abc"),
        ("HVDRECOVER_REJOIN", "0"),
        ("HOROVOD_LOCAL_RANK", "-1"),
        ("HOROVOD_GLOO_RENDEZVOUS_PORT", ""),
    ],
)
def test_what_none_of_our_processes_has_set_is_left_alone(name, text):
    assert config.read({name: text}) == config.read({})


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
    read, write = os.pipe()
    try:
        os.set_inheritable(read, True)
        config.keep_to_this_process(read)
        assert not os.get_inheritable(read)
        assert not {"HVDRECOVER_SLOT", "HVDRECOVER_REJOIN"} & set(config.environment())
        config.keep_to_this_process()
    finally:
        os.close(read)
        os.close(write)


@pytest.fixture
def clean_environment(monkeypatch):
    # Set first, so that the end of the test takes them away whoever set them.
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [({"PMIX_RANK": "0"}, None), ({"HOROVOD_CONTROLLER": "mpi"}, "mpi"), ({}, "gloo")],
)
def test_a_controller_is_chosen_only_where_nobody_chose_one(clean_environment, monkeypatch, environ, chosen):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config.choose_controller(config.read())
    assert os.environ.get("HOROVOD_CONTROLLER") == os.environ.get("HOROVOD_CPU_OPERATIONS", chosen) == chosen


def chosen_by_a_parent(monkeypatch, **variables):
    """The environment of a child of a process that chose for itself."""
    config.choose_controller(config.read({}))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config.choose_controller(config.read())
    return os.environ.get("HOROVOD_CONTROLLER")


def test_a_child_that_mpirun_started_does_not_inherit_the_choice(clean_environment, monkeypatch):
    assert chosen_by_a_parent(monkeypatch, OMPI_COMM_WORLD_RANK="0") is None


def test_a_child_that_horovodrun_started_keeps_the_launchers_choice(clean_environment, monkeypatch):
    launched = {"HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    assert chosen_by_a_parent(monkeypatch, **launched) == "gloo"


@pytest.mark.parametrize(
    ("environ", "exempt"),
    [
        ({}, None),
        ({"http_proxy": "http://proxy:3128"}, "10.0.0.7"),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": ".site"}, ".site,10.0.0.7"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "a", "NO_PROXY": "b"}, "a,10.0.0.7"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, "*"),
        ({"https_proxy": "http://proxy:3128"}, None),
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


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """The folder of a Python environment, with Open MPI's compiler in it."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpicxx").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "packaged", "told"),
    [
        (None, True, True),
        (None, False, False),
        ("OPAL_PREFIX", True, False),
        ("OMPI_COMM_WORLD_RANK", True, False),
    ],
)
def test_open_mpi_from_pypi_is_told_where_it_is(variable, packaged, told, prefix, monkeypatch):
    monkeypatch.setattr(config.metadata, "distributions", lambda name: [name] * packaged)
    found = config.open_mpi({variable: "/opt"} if variable else {})
    assert found == ({"OPAL_PREFIX": str(prefix)} if told else {})
