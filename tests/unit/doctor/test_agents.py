"""Questions to hosts: this one, where a real process answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.doctor.agents import Agents
from hvdrecover.doctor.examination import Settings
from hvdrecover.errors import ConfigError, LaunchError

PATIENCE = 60.0  # seconds
HERE = "localhost"


@pytest.fixture
def agents() -> Iterator[Agents]:
    with Agents([HERE], None, None) as agents:
        yield agents


def ask(agents: Agents, question: str, *about: object) -> object:
    return agents.require(question, {HERE: about}, PATIENCE)[HERE]


def test_this_host_answers_without_ssh(agents: Agents) -> None:
    assert agents.local == [HERE]
    facts = agents.require("facts", {HERE: ()}, PATIENCE)[HERE]
    assert facts["interfaces"]["lo"] == "127.0.0.1"
    assert facts["memory"] > 0 and facts["versions"]["hvdrecover"]
    names = {"localhost": "127.0.0.1", "nowhere.invalid": None}
    assert ask(agents, "resolve", list(names)) == names
    assert ask(agents, "route", "127.0.0.1") == ["lo", "127.0.0.1"]
    assert ask(agents, "route", "255.255.255.255") == ["", ""]
    peers = {"itself": ("127.0.0.1", facts["port"]), "nobody": ("127.0.0.1", 1)}
    reached = agents.require("reach", {HERE: (peers,)}, PATIENCE)[HERE]
    assert 0 < reached["itself"] < PATIENCE and reached["nobody"] == "Connection refused"
    assert agents.answers["reach"] == {HERE: reached}


def test_the_question_after_an_error_is_answered(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(LaunchError, match=r"^localhost: .*'other'"):
        ask(agents, "root", str(tmp_path))
    before = time.time()
    assert before <= float(str(ask(agents, "clock"))) <= time.time()


def test_a_process_that_does_not_answer_in_time_is_ended(agents: Agents) -> None:
    ask(agents, "clock")
    process = agents._agents[HERE]._process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match=r"^localhost: no answer in 0 s$"):
        agents.require("clock", {HERE: ()}, 0.1)
    assert process.poll() == -signal.SIGKILL
    with pytest.raises(LaunchError, match=r"^localhost: no answer in 0 s$"):
        ask(agents, "clock")


def test_a_host_without_an_ssh_server_is_an_error() -> None:
    with Agents(["127.0.0.2"], 1, None) as agents:
        (found,) = agents.ask("facts", {"127.0.0.2": ()}, PATIENCE).values()
    assert isinstance(found, LaunchError)
    assert "Connection refused" in found.problem
    assert agents.answers == {"facts": {"127.0.0.2": {"error": found.problem}}}


def test_an_agent_removes_its_test_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Agents([HERE], None, None) as agents:
        ask(agents, "root", str(root))
        ask(agents, "write")
        (left,) = root.iterdir()
        assert left.name.startswith(TEMPORARY)
    assert not root.exists()


def test_ranks_fill_one_host_before_the_next() -> None:
    hosts = {"h1": 2, "h2": 2, "h3": 2}
    assert Settings(hosts, 6).ranks() == hosts
    assert Settings(hosts, 3).ranks() == {"h1": 2, "h2": 1}
    with pytest.raises(ConfigError, match=r"^-np: 7 .* 6 slots$"):
        Settings(hosts, 7).ranks()
