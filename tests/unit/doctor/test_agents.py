"""Hosts that are asked: this one, with a real process that answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.doctor.agents import Agent, Agents
from hvdrecover.doctor.examination import Settings
from hvdrecover.doctor.facts import HostFacts
from hvdrecover.errors import ConfigError, LaunchError

PATIENCE = 60.0  # seconds


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent("localhost")
    yield made
    made.close()


def test_this_host_answers_for_itself(agent: Agent) -> None:
    assert agent.here
    found = HostFacts.of(agent.ask("facts", timeout=PATIENCE))
    assert found.name == os.uname().nodename
    assert agent.ask("resolve", ["localhost", "nowhere.invalid"], timeout=PATIENCE) == {
        "localhost": "127.0.0.1",
        "nowhere.invalid": None,
    }
    assert agent.ask("route", "127.0.0.1", timeout=PATIENCE) == ["lo", "127.0.0.1"]
    peers = {"itself": ("127.0.0.1", found.port), "nobody": ("127.0.0.1", 1)}
    assert agent.ask("reach", peers, timeout=PATIENCE) == {"itself": "", "nobody": "Connection refused"}
    before = time.time()
    assert before <= agent.ask("clock", timeout=PATIENCE) <= time.time()


def test_a_question_that_fails_is_an_error_and_the_next_one_is_answered(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(LaunchError, match=r"^localhost: .*'other'"):
        agent.ask("root", str(tmp_path), timeout=PATIENCE)
    assert agent.ask("clock", timeout=PATIENCE)


def test_who_does_not_answer_in_time_is_ended(agent: Agent) -> None:
    agent.ask("clock", timeout=PATIENCE)
    os.kill(agent._process.pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match=r"^localhost: .* 0 s$"):
        agent.ask("clock", timeout=0.1)
    assert agent._process.poll() == -signal.SIGKILL
    with pytest.raises(LaunchError, match=r"^localhost: .* 0 s$"):
        agent.ask("clock", timeout=PATIENCE)


def test_a_host_that_can_not_be_logged_in_to_says_why() -> None:
    with Agents(["127.0.0.2"], 1, None) as agents:
        (found,) = agents.ask({"127.0.0.2": ()}, "facts", PATIENCE).values()
    assert isinstance(found, LaunchError)
    assert "Connection refused" in found.problem


def test_an_agent_takes_with_it_what_it_has_made(agent: Agent, tmp_path: Path) -> None:
    root = tmp_path / "root"
    agent.ask("root", str(root), timeout=PATIENCE)
    agent.ask("write", timeout=PATIENCE)
    (left,) = root.iterdir()
    assert left.name.startswith(TEMPORARY)
    agent.close()
    assert not root.exists()


def test_ranks_fill_one_host_before_the_next() -> None:
    hosts = {"h1": 2, "h2": 2, "h3": 2}
    assert Settings(hosts, 6).ranks() == hosts
    assert Settings(hosts, 3).ranks() == {"h1": 2, "h2": 1}
    with pytest.raises(ConfigError, match=r"^-np: 7 .* 6 slots$"):
        Settings(hosts, 7).ranks()
