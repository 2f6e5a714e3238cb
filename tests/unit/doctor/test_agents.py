"""Questions to hosts: this one, where real processes answer."""

from __future__ import annotations

import pytest

from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.doctor.examination import Agents, Settings, examine
from hvdrecover.errors import ConfigError, LaunchError

PATIENCE = 60.0  # seconds
HERE = "localhost"


@pytest.fixture
def agents() -> Agents:
    return Agents([HERE], None, None)


def ask(agents: Agents, question: str, *about: object) -> object:
    return agents.require(question, {HERE: about}, PATIENCE)[HERE]


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
