"""The lab as a fixture, and a reason where there can be none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.conftest import a_users_shell, one_thread, start
from tests.lab.lab import Lab
from tests.lab.network import LabError, program

__all__ = ["a_users_shell", "lab", "one_thread", "start"]

_PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client"}
# In namespaces that go with the process that tries it.
_TRIAL = "ip link add name switch type bridge && ip link add name port1 type veth peer name eth0"


@pytest.fixture(scope="session")
def _possible() -> None:
    """Skip, with the reason, where there can be no lab."""
    if os.geteuid() != 0:
        pytest.skip("the lab of several hosts needs root: sudo .venv/bin/python -m pytest tests/lab")
    if missing := [package for name, package in _PACKAGES.items() if not _has(name)]:
        message = f"the lab of several hosts needs: apt-get install {' '.join(missing)}"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    trial = [shutil.which("unshare") or "unshare", "--net", "--mount", "sh", "-c", _TRIAL]
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(
            f"this machine does not let root make the lab of several hosts: {done.stderr.strip()};"
            " a container needs --privileged to run tests/lab"
        )


@pytest.fixture
def lab(_possible: None) -> Iterator[Lab]:
    """Three hosts, of this test only."""
    with Lab() as made:
        yield made


def _has(name: str) -> bool:
    try:
        return bool(program(name))
    except LabError:
        return False
