"""The lab as a fixture, and a reason where there can be none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.conftest import a_users_shell, jobs, light, one_thread, start
from tests.support.lab import Lab, lacks

__all__ = ["a_users_shell", "jobs", "lab", "light", "one_thread", "start"]


def pytest_runtest_setup() -> None:
    """Skip every test in this folder, with one reason, where there can be no lab."""
    if why := lacks():
        in_ci = os.environ.get("CI") == "true" and "apt-get install" in why
        (pytest.fail if in_ci else pytest.skip)(f"the lab of several hosts: {why}")


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Three hosts, of this test only."""
    with Lab() as made:
        yield made
