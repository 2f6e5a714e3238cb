"""The lab as a fixture, and a reason where there can be none."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.conftest import a_users_shell, one_thread, start
from tests.lab.lab import Lab
from tests.lab.network import LabError, program

__all__ = ["a_users_shell", "lab", "one_thread", "start"]

_PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client"}
_TRIAL = "{0} link add name switch type bridge && {0} link add name port1 type veth peer name eth0"


def pytest_runtest_setup() -> None:
    """Skip every test in this folder, with one reason, where there can be no lab."""
    if os.geteuid() != 0:
        pytest.skip("the lab of several hosts needs root: sudo .venv/bin/python -m pytest tests/lab")
    if missing := [package for name, package in _PACKAGES.items() if not _has(name)]:
        message = f"the lab of several hosts needs: apt-get install {' '.join(missing)}"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    if complaint := _trial():
        pytest.skip(
            f"this machine does not let root make the lab of several hosts: {complaint};"
            " a container needs --privileged to run tests/lab"
        )


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Three hosts, of this test only."""
    with Lab() as made:
        yield made


def _has(name: str) -> bool:
    try:
        return bool(program(name))
    except LabError:
        return False


@functools.cache
def _trial() -> str:
    """What the kernel has against a lab; tried in namespaces that go with the process that tries."""
    command = ["unshare", "--net", "--mount", "sh", "-c", _TRIAL.format(program("ip"))]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode != 0 else ""
