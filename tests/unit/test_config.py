import os
import socket
from pathlib import Path

import pytest

from hvdrecover import config
from hvdrecover.errors import ConfigError


def test_an_empty_environment_gives_the_defaults():
    assert config.read({}) == config.Config(
        checkpoint=None,
        events=None,
        log="info",
        elastic=False,
        launched=False,
        controller_chosen=False,
        controller_inherited=False,
        host=socket.gethostname(),
    )


def test_every_variable_is_read():
    found = config.read(
        {
            "HVDRECOVER_CHECKPOINT": "s3://bucket/run",
            "HVDRECOVER_EVENTS": "/var/log/run",
            "HVDRECOVER_LOG": "WARNING",
            "HVDRECOVER_MAX_DURABLE_AGE": "1.5e3",
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_RANK": "3",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_HOSTNAME": "node-7",
        }
    )
    assert found == config.Config(
        "s3://bucket/run", Path("/var/log/run"), "warning", True, True, True, False, "node-7", 1500.0
    )


def test_an_empty_variable_counts_as_unset():
    names = ("CHECKPOINT", "EVENTS", "LOG", "MAX_DURABLE_AGE")
    unset = {f"HVDRECOVER_{name}": "" for name in names}
    assert config.read({**unset, "HOROVOD_HOSTNAME": ""}) == config.read({})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "10 min", "true"])
def test_an_age_that_is_no_time_is_an_error(text):
    with pytest.raises(ConfigError, match="is not a number of seconds above 0") as caught:
        config.read({"HVDRECOVER_MAX_DURABLE_AGE": text})
    assert caught.value.name == "HVDRECOVER_MAX_DURABLE_AGE"


def test_an_unknown_log_level_is_an_error_that_names_the_variable():
    with pytest.raises(ConfigError, match=r"HVDRECOVER_LOG: 'loud' .* debug, info, warning, error") as caught:
        config.read({"HVDRECOVER_LOG": "loud"})
    assert caught.value.name == "HVDRECOVER_LOG"


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"])
def test_each_launcher_is_noticed(name):
    assert config.read({name: "0"}).launched


def test_a_static_horovod_job_is_not_elastic():
    assert not config.read({"HOROVOD_RANK": "0", "HOROVOD_ELASTIC": "0"}).elastic


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("HVDRECOVER_CHECKPOINT", "/data/run")
    assert config.read().checkpoint == "/data/run"


@pytest.fixture
def clean_environment(monkeypatch):
    # Set first, so that the end of the test takes them away whoever set them.
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HVDRECOVER_CONTROLLER_CHOSEN_BY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_process_that_nobody_launched_runs_without_mpi(clean_environment):
    config.choose_controller(config.read({}))
    assert os.environ["HOROVOD_CONTROLLER"] == "gloo"
    assert os.environ["HOROVOD_CPU_OPERATIONS"] == "gloo"


@pytest.mark.parametrize("environ", [{"PMIX_RANK": "0"}, {"HOROVOD_CONTROLLER": "mpi"}])
def test_a_controller_that_somebody_chose_is_left_alone(clean_environment, environ):
    config.choose_controller(config.read(environ))
    assert "HOROVOD_CONTROLLER" not in os.environ


def chosen_by_a_parent(monkeypatch, **variables):
    """The environment of a child of a process that chose for itself."""
    config.choose_controller(config.read({}))
    monkeypatch.setenv("HVDRECOVER_CONTROLLER_CHOSEN_BY", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config.choose_controller(config.read())
    return os.environ.get("HOROVOD_CONTROLLER")


def test_a_child_that_mpirun_started_does_not_inherit_the_choice(clean_environment, monkeypatch):
    assert chosen_by_a_parent(monkeypatch, OMPI_COMM_WORLD_RANK="0") is None


def test_a_child_that_horovodrun_started_keeps_the_launchers_choice(clean_environment, monkeypatch):
    launched = {"HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    assert chosen_by_a_parent(monkeypatch, **launched) == "gloo"


def test_a_child_that_nobody_launched_chooses_for_itself(clean_environment, monkeypatch):
    assert chosen_by_a_parent(monkeypatch) == "gloo"
    assert os.environ["HVDRECOVER_CONTROLLER_CHOSEN_BY"] == str(os.getpid())
