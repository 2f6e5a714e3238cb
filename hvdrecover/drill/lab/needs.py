"""The requirements of a lab on this machine."""

from __future__ import annotations

import functools
import os
import subprocess

from hvdrecover.drill.lab.network import PACKAGES, find, program

_TRIAL = "{0} link add name switch type bridge && {0} link add name port1 type veth peer name eth0"


def lacks() -> str:
    """Return what keeps a lab from being made here, with the remedy; empty if nothing does."""
    if os.geteuid() != 0:
        return "only root can make hosts; start it by sudo"
    if absent := missing_packages():
        return f"it needs programs that are not here; apt-get install {' '.join(absent)}"
    if complaint := _trial():
        return (
            f"this machine does not let root make hosts: {complaint}; a container has to be started with "
            "--privileged"
        )
    return ""


def missing_packages() -> list[str]:
    """The packages of Debian and Ubuntu whose programs are not here."""
    return sorted({package for name, package in PACKAGES.items() if find(name) is None})


@functools.cache
def _trial() -> str:
    """Return what the kernel has against a lab; tried in namespaces that go with the process that tries."""
    command = ["unshare", "--net", "--mount", "sh", "-c", _TRIAL.format(program("ip"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode != 0 else ""
