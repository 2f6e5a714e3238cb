"""The host discovery script, which Horovod's driver asks each second: here, at the price of a shell.

Horovod 0.28.1 starts two Python processes for each question, for 70 ms of processor time.
"""

from __future__ import annotations

import subprocess
from typing import Any

from hvdrecover import config
from hvdrecover.discovery.hosts import Host, parse
from hvdrecover.errors import DiscoveryError
from hvdrecover.launch import processes, waits


def ask(command: str, stderr: int | None = None) -> tuple[list[Host], int]:
    """Run a script's command in a shell, which dies with this process.

    Horovod puts the names of hosts into commands of a shell, so nothing else may come in their place.

    Args:
        command: what prints a line for each host.
        stderr: as for `subprocess.Popen`.

    Returns:
        The hosts, none of them if it has failed, and its exit code.

    Raises:
        DiscoveryError: it has not ended in time, or has printed what names no host.
    """
    child = processes.start(
        ["/bin/sh", "-c", command],
        config.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    try:
        printed, _ = child.communicate(timeout=waits.DISCOVERY)
    except subprocess.TimeoutExpired:
        problem = f"'{command}' has not ended in {waits.DISCOVERY:g} s"
        raise DiscoveryError("--host-discovery-script", problem) from None
    finally:
        child.kill_group()  # if it was not waited for: with all that the shell has started
        child.ends()
        assert child.stdout is not None
        child.stdout.close()
    if child.returncode != 0:
        return [], child.returncode
    lines = dict.fromkeys(printed.decode(errors="replace").splitlines())  # some say a host twice
    return parse("\n".join(lines), "--host-discovery-script"), 0


def ask_by_shell(script: Any) -> None:
    """Have a class of scripts run its command in a shell, without a process in between.

    Args:
        script: Horovod's class, which is changed.
    """
    script._execute_discovery_script = _printed


def _printed(self: Any) -> str:
    """Return what a script prints.

    Raises:
        RuntimeError: there is no usable answer; Horovod's driver reports that, and asks again.
    """
    command: str = self._discovery_script
    try:
        hosts, code = ask(command)
    except DiscoveryError as error:
        raise RuntimeError(str(error)) from error
    if code != 0:
        raise RuntimeError(f"the host discovery script `{command}` has ended with {processes.describe(code)}")
    return "\n".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)
