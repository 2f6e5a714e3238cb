"""Questions to hosts: this one, where real processes answer."""

from __future__ import annotations

import pytest

from hvdrecover.doctor.examination import Examination, Settings
from hvdrecover.errors import ConfigError, LaunchError


def test_a_host_without_an_ssh_server_is_an_error() -> None:
    examination = Examination(Settings({"127.0.0.2": 1}, 1, ssh_port=1))
    (found,) = examination.ask("clock", {"127.0.0.2": ()}, 60.0).values()
    assert isinstance(found, LaunchError)
    assert "Connection refused" in found.problem


def test_a_job_with_too_few_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^-np: 7 .* 6 slots$"):
        Settings({"h1": 2, "h2": 2, "h3": 2}, 7).ranks()


def test_ranks_fill_one_host_before_the_next() -> None:
    hosts = {"h1": 2, "h2": 2, "h3": 2}
    assert Settings(hosts, 6).ranks() == hosts
    assert Settings(hosts, 3).ranks() == {"h1": 2, "h2": 1}
