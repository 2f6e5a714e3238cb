"""Questions to hosts: this one, where real processes answer."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.doctor.examination import Agents, Settings, examine
from hvdrecover.doctor.host import interfaces, reach
from hvdrecover.errors import ConfigError, LaunchError

PATIENCE = 60.0  # seconds
HERE = "localhost"


@pytest.fixture
def agents() -> Agents:
    return Agents([HERE], None, None)


def free_ports() -> tuple[int, int]:
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def ask(agents: Agents, question: str, *about: object) -> object:
    return agents.require(question, {HERE: about}, PATIENCE)[HERE]


def test_this_host_answers_without_ssh(agents: Agents) -> None:
    assert agents.local == [HERE]
    before = time.time()
    now = float(str(ask(agents, "clock")))
    assert before <= now <= time.time()
    assert agents.answers == {"clock": {HERE: now}}


def test_hosts_connect_to_each_other_and_nobody_to_a_port_without_a_listener() -> None:
    other, (mine, theirs) = "127.0.0.1", free_ports()
    asked = {HERE: (mine, {other: (other, theirs)}), other: (theirs, {HERE: (other, mine)})}
    found = Agents([HERE, other], None, None).require("reach", asked, PATIENCE)
    for name, reached in found.items():
        assert [type(seconds) for seconds in reached.values()] == [float], name
    assert reach(mine, {"nobody": (other, 1)}) == {"nobody": "Connection refused"}
    assert interfaces()["lo"] == "127.0.0.1"


def test_the_error_of_a_question_is_the_hosts(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with pytest.raises(LaunchError, match=r"^localhost: .*'other'"):
        ask(agents, "root", str(tmp_path))


def test_a_process_that_does_not_answer_in_time_is_ended(agents: Agents) -> None:
    with pytest.raises(LaunchError, match=r"^localhost: no answer in 0 s$"):
        agents.require("clock", {HERE: ()}, 0.0)


def test_a_host_without_an_ssh_server_is_an_error() -> None:
    agents = Agents(["127.0.0.2"], 1, None)
    (found,) = agents.ask("clock", {"127.0.0.2": ()}, PATIENCE).values()
    assert isinstance(found, LaunchError)
    assert "Connection refused" in found.problem
    assert agents.answers == {"clock": {"127.0.0.2": {"error": found.problem}}}


def test_a_job_with_too_few_slots_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"^-np: 7 .* 6 slots$"):
        examine(Settings({"h1": 2, "h2": 2, "h3": 2}, 7), SYSTEM_CLOCK, lambda topic: None)


def test_ranks_fill_one_host_before_the_next() -> None:
    hosts = {"h1": 2, "h2": 2, "h3": 2}
    assert Settings(hosts, 6).ranks() == hosts
    assert Settings(hosts, 3).ranks() == {"h1": 2, "h2": 1}
